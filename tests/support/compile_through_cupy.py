"""Compiles kernels as the launcher does, through CuPy, on a machine without a GPU.

    python tests/support/compile_through_cupy.py [folder of kernels [module:rule]]

CuPy asks the driver which GPU is there and loads what it has compiled; both are cut out here. All
that is between, options and headers and the cache on disk, is CuPy's own. Prints seconds for each.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import cupy
import cupy._core.raw
from cupy.cuda import compiler, function
from cupy_backends.cuda.libs import nvrtc
from every_kernel import kernels_of_dense_update, kernels_of_sparse_update

from gpuopt.backends.cuda import cupy_launcher
from gpuopt.rules.sources import kernel_root, on_disk

NO_NVRTC = 77

ARCHITECTURE = "90"


class UnloadedModule(function.Module):
    def load(self, cubin: bytes) -> None:
        assert cubin.startswith(b"\x7fELF")


class RawModule(cupy.RawModule):
    def get_function(self, name: str) -> Any:
        return self.module.mapping[name]


def cut_out_driver() -> None:
    function.Module = UnloadedModule
    cupy.RawModule = RawModule
    cupy._core.raw._get_raw_module = cupy._core.raw._get_raw_module.__wrapped__
    compiler._get_arch = lambda: ARCHITECTURE
    compiler._get_arch_for_options_for_nvrtc = lambda arch=None: (f"-arch=sm_{arch}", "cubin")


def main() -> int:
    try:
        nvrtc.getVersion()
    except (OSError, RuntimeError):
        return NO_NVRTC
    cut_out_driver()
    if sys.argv[1:]:
        kernels = Path(sys.argv[1])
        cupy_launcher.on_disk = lambda folder: (
            kernels if folder == kernel_root() else on_disk(folder)
        )
    module, _, name = (sys.argv[2:] or ["gpuopt.optimizers.adam:adam"])[0].partition(":")
    rule = getattr(importlib.import_module(module), name)
    wanted = {
        "dense": kernels_of_dense_update(rule, "bfloat16"),
        "sparse": kernels_of_sparse_update(rule, "bfloat16"),
    }
    for use, group in wanted.items():
        begin = time.perf_counter()
        for kernel in group:
            assert cupy_launcher.load(kernel).startswith(f"_ZN6gpuopt{len(kernel.function)}")
        print(f"{use}: {len(group)} kernels in {time.perf_counter() - begin:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
