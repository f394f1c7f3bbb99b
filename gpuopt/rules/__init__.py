"""What an update rule is, and where its CUDA form stands."""
