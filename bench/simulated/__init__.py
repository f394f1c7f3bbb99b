"""gpuopt's kernels in GPGPU-Sim: the PTX that NVRTC makes of them. Nothing here is measured."""
