"""One call of `apply_gradients`."""
