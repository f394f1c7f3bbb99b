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
        fma=False,
        lineinfo=True,
        ptxas_options=["-v"],
    )
    compiled = Program(source, "c++", options).compile("cubin", name_expressions=names, logs=log)
    return compiled, log.getvalue()


def ptx_of(group: list[Kernel], architecture: str) -> dict[str, str]:
    """Compiles kernels with CuPy's options; returns the PTX of each, by its expression.

    Args:
        group: The kernels.
        architecture: As "compute_90".
    """
    from cuda.bindings import nvrtc
    from cuda.pathfinder import find_nvidia_header_directory

    def call(function: Any, *arguments: Any) -> Any:
        error, *results = function(*arguments)
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, (function.__name__, error)
        return results[0] if results else None

    pieces = dict.fromkeys(piece for kernel in group for piece in kernel.pieces)
    folders = [
        *dict.fromkeys(on_disk(folder) for kernel in group for folder in kernel.include_folders),
        find_nvidia_header_directory("cudart"),
    ]
    options = ["-std=c++17", "-default-device", "-ftz=true", "-fmad=false", f"-arch={architecture}"]
    options += [f"-I{folder}" for folder in folders]
    program = call(nvrtc.nvrtcCreateProgram, "\n".join(pieces).encode(), b"kernels.cu", 0, [], [])
    for kernel in group:
        call(nvrtc.nvrtcAddNameExpression, program, kernel.expression.encode())
    call(nvrtc.nvrtcCompileProgram, program, len(options), [each.encode() for each in options])
    text = b" " * call(nvrtc.nvrtcGetPTXSize, program)
    call(nvrtc.nvrtcGetPTX, program, text)
    entries = {
        entry.partition("(")[0].strip(): entry for entry in text.decode().split(".entry ")[1:]
    }
    return {
        kernel.expression: entries[
            call(nvrtc.nvrtcGetLoweredName, program, kernel.expression.encode()).decode()
        ]
        for kernel in group
    }
