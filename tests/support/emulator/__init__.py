"""Runs the package's CUDA kernels on a CPU."""

from emulator.emulator import EmulatorLauncher, KernelError

__all__ = ["EmulatorLauncher", "KernelError"]
