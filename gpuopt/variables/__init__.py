"""Variables: named arrays that optimizers update; and IndexedSlices, their sparse gradients."""
