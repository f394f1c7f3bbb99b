"""Updates on NVIDIA GPUs, by kernels that NVRTC compiles at run time."""
