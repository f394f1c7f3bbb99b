"""Named arrays that optimizers update, and what stands for their gradients."""
