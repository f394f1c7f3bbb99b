"""Random programs, run by gpuopt and by a naive model of it side by side."""
