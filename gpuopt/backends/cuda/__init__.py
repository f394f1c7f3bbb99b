"""Updates on NVIDIA GPUs, by kernels that NVRTC compiles at run time."""

from __future__ import annotations

from gpuopt.backends.backend import Backend
from gpuopt.backends.cuda.availability import ask_driver, why_no_gpu
from gpuopt.device import Device
from gpuopt.errors import DeviceUnavailableError
from gpuopt.locks import importing

__all__ = ["cuda_backend"]


def cuda_backend(device: Device) -> Backend:
    """Makes the backend of a GPU; CuPy is imported here, not before.

    Raises:
        DeviceUnavailableError: there is no such GPU, or CuPy cannot use it.
    """
    driver = ask_driver()
    reason = why_no_gpu(driver)
    if reason is not None:
        raise DeviceUnavailableError(f'"{device}" was asked for: {reason}')
    if device.index >= len(driver.gpus):
        present = ", ".join(f"gpu:{index}" for index in range(len(driver.gpus)))
        raise DeviceUnavailableError(
            f'"{device}" was asked for, but this machine has {len(driver.gpus)} GPU'
            f"{'s' if len(driver.gpus) > 1 else ''} ({present})"
        )
    # Here, because CuPy is heavy, and may be missing.
    with importing:
        from gpuopt.backends.cuda.backend import CudaBackend
        from gpuopt.backends.cuda.cupy_launcher import CupyLauncher

    return CudaBackend(device, CupyLauncher(device.index))
