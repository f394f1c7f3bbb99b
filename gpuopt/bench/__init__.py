"""The benchmark of a user's machine: `gpuopt bench`."""
