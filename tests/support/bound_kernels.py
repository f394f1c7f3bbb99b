"""Lists the kernels that steps launch, to compile them all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
from emulator import EmulatorLauncher

from gpuopt.backends import using
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import Download
from gpuopt.device import Device


class _NotingLauncher(EmulatorLauncher):
    """Notes kernels, and neither compiles nor runs them."""

    def __init__(self) -> None:
        super().__init__(xp=fake_cupy)
        self.found: dict[str, Kernel] = {}

    def find(self, kernel: Kernel) -> Any:
        self.found[kernel.expression] = kernel

    def start(self, *launch: Any) -> None:
        pass

    def download(self, source: Any) -> Download:
        return Download(np.zeros_like(self.host(source)), self.record())


def kernels_bound_by(run: Callable[[], object]) -> list[Kernel]:
    """Returns the kernels that what runs on gpu:0 would launch.

    They compute nothing: where the host asks for what they would write, it is told of zeros.
    """
    launcher, gpu = _NotingLauncher(), Device("gpu", 0)
    with using(gpu, CudaBackend(gpu, launcher)):
        run()
    return list(launcher.found.values())


def compile_together(run: Callable[[], object]) -> None:
    """Compiles the kernels that what runs on gpu:0 will launch, in a few libraries."""
    EmulatorLauncher().prepare(kernels_bound_by(run))
