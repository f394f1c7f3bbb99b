"""Compiles kernels as CuPy does, without a GPU or driver."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.rules.sources import kernel_root, on_disk

# Turing to Blackwell; the first is the one we tune for.
ARCHITECTURES = ["sm_90", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"]


def compile_together(
    group: list[Kernel], architecture: str, instead: Path | None = None
) -> tuple[Any, str]:
    """Compiles kernels with CuPy's options; returns the code and what ptxas reported.

    The same kernels are compiled once in a process: several tests look at them.

    Args:
        group: The kernels.
        architecture: As "sm_90".
        instead: A folder with other sources in the place of `kernels/`.
    """
    pieces = dict.fromkeys(piece for kernel in group for piece in kernel.pieces)
    folders = dict.fromkeys(
        on_disk(folder) for kernel in group for folder in kernel.include_folders
    )
    if instead is not None:
        folders = {
            instead if folder == on_disk(kernel_root()) else folder: None for folder in folders
        }
    names = tuple(kernel.expression for kernel in group)
    return _compile("\n".join(pieces), names, tuple(folders), architecture)


@functools.cache
def _compile(
    source: str, names: tuple[str, ...], folders: tuple[Path, ...], architecture: str
) -> tuple[Any, str]:
    from cuda.core import Program, ProgramOptions
    from cuda.pathfinder import find_nvidia_header_directory

    log = io.StringIO()
    options = ProgramOptions(
        std="c++17",
        device_as_default_execution_space=True,
        arch=architecture,
        include_path=[*map(str, folders), find_nvidia_header_directory("cudart")],
        ftz=True,
        ptxas_options=["-v"],
    )
    compiled = Program(source, "c++", options).compile("cubin", name_expressions=names, logs=log)
    return compiled, log.getvalue()
