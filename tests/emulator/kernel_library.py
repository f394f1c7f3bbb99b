"""Kernels as functions of this process: compiled by g++, kept on disk, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.kernel_sources import kernel_root

HERE = Path(__file__).resolve().parent

# As NVRTC does: multiply-adds are fused, and memory is read as whatever type.
FLAGS = [
    *(
        "-std=c++20",
        "-O1",
        "-fexpensive-optimizations",
        "-mfma",
        "-ffp-contract=fast",
        "-fno-strict-aliasing",
    ),
    # setjmp and longjmp switch stacks here, which the fortified ones refuse.
    *("-U_FORTIFY_SOURCE", "-fvisibility=hidden", "-fPIC", "-shared", "-w"),
    *("-fdata-sections", f"-Wl,-T,{HERE / 'shared_memory.ld'}"),
]
SANITIZER_FLAGS = {
    "": [],
    "address": [
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        *("-g1", "-fno-omit-frame-pointer"),
    ],
    "thread": ["-fsanitize=thread", "-g1"],
}
# So many take g++ about 10 seconds.
KERNELS_PER_LIBRARY = 24

# The emulator runs one launch at a time.
_launching = threading.Lock()


class KernelError(RuntimeError):
    """A kernel does not compile, is not what Python takes it for, or fails at run time."""


def what_is_missing() -> str | None:
    """Returns why kernels cannot be emulated here, or None where they can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the emulator knows how to flush denormals on x86-64 only"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if cuda_headers() is None:
        return "nvidia-cuda-runtime and nvidia-cuda-crt, from 13 on, are not installed"
    return None


@functools.cache
def cuda_headers() -> Path | None:
    """Returns the folder of NVIDIA's headers, which two packages of the `test` group share."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or []:
        include = Path(folder, "cu13", "include")
        if (include / "cuda_fp16.h").exists() and (include / "crt" / "host_defines.h").exists():
            return include
    return None


@dataclass(frozen=True)
class Function:
    """A compiled kernel.

    Attributes:
        parameters: Its C++ parameters, named as those of `Kernel`.
    """

    library: ctypes.CDLL
    index: int
    parameters: tuple[str, ...]

    def launch(
        self, num_blocks: int, num_threads: int, addresses: Sequence[int], seed: int, strict: bool
    ) -> str | None:
        """Runs the kernel to its end; returns what went wrong, if anything did."""
        arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        with _launching:
            report = self.library.emulator_launch(
                self.index, num_blocks, num_threads, arguments, seed, strict
            )
            return None if report is None else report.decode()


_functions: dict[tuple[str, str], Function] = {}


def find(kernel: Kernel, sanitize: str) -> Function:
    """Returns the function; compiles it, alone, if nothing has yet."""
    if (sanitize, kernel.expression) not in _functions:
        compile_all([kernel], sanitize)
    return _functions[sanitize, kernel.expression]


def compile_all(kernels: Iterable[Kernel], sanitize: str) -> None:
    """Compiles what is neither here nor on disk, on all cores.

    Raises:
        KernelError: with what g++ has to say.
    """
    if sanitize and f"lib{sanitize[0]}san" not in os.environ.get("LD_PRELOAD", ""):
        raise KernelError(
            f"the {sanitize} sanitizer must be there when Python starts: sanitized.py"
        )
    missing = {k.expression: k for k in kernels if (sanitize, k.expression) not in _functions}
    by_file: dict[str, list[Kernel]] = {}
    for _, kernel in sorted(missing.items()):
        by_file.setdefault(kernel.source.splitlines()[-1], []).append(kernel)
    batches = [
        group[start : start + KERNELS_PER_LIBRARY]
        for group in by_file.values()
        for start in range(0, len(group), KERNELS_PER_LIBRARY)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = pool.map(lambda batch: _compile(batch, sanitize), batches)
        for batch, path in zip(batches, paths, strict=True):
            _load(batch, path, sanitize)


def _compile(kernels: Sequence[Kernel], sanitize: str) -> Path:
    source = _source(kernels)
    with as_file(kernel_root()) as folder:
        command = ["g++", *FLAGS, *SANITIZER_FLAGS[sanitize]]
        command += [f"-I{folder}", f"-I{HERE}", f"-isystem{cuda_headers()}", "-x", "c++", "-"]
        everything = [_compiler_version(), repr(command), source, _digest(folder), _digest(HERE)]
        name = hashlib.sha256("\0".join(everything).encode()).hexdigest()[:32]
        library = _cache() / f"{name}.so"
        if library.exists():
            return library
        # Under a name of its own first: another process may be at it too.
        unfinished = library.with_suffix(f".{os.getpid()}")
        result = subprocess.run(
            [*command, "-o", str(unfinished)],
            input=source,
            text=True,
            capture_output=True,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        )
        if result.returncode:
            raise KernelError(f"g++ does not compile the kernels:\n{result.stderr}")
        unfinished.rename(library)
        return library


def _source(kernels: Sequence[Kernel]) -> str:
    """A translation unit for kernels of one file, with the headers that any of them needs."""
    includes = dict.fromkeys(line for kernel in kernels for line in kernel.source.splitlines())
    # The file, last of each kernel's, needs the headers of others before it no more than its own.
    file = kernels[0].source.splitlines()[-1]
    includes = [line for line in includes if line != file] + [file]
    bounds = _launch_bounds(kernels[0])
    entries = []
    for kernel in kernels:
        expression = kernel.expression
        bound = ""
        if kernel.function in bounds:
            bound = expression.replace(kernel.function, f"launch_bound_of_{kernel.function}", 1)
        entries.append(f"::emulator::describe<({expression})>({bound})")
    return "\n".join(
        [
            '#include "cuda_emu.h"',
            # See shared_memory.ld.
            "namespace {",
            *includes,
            "namespace gpuopt {",
            *bounds.values(),
            "}",
            "}",
            f"EMULATOR_KERNELS({', '.join(entries)})\n",
        ]
    )


_BOUNDED = re.compile(
    r"(template\s*<[^{};()]*>\s*)?__global__\s+void\s+__launch_bounds__\(([^{};]*?)\)\s*(\w+)\s*\("
)


def _launch_bounds(kernel: Kernel) -> dict[str, str]:
    """Definitions, for each function of the kernel's file that has launch bounds, of the first."""
    file = re.search(r'"(.*)"', kernel.source.splitlines()[-1])
    assert file is not None
    with as_file(kernel_root()) as folder:
        path = next(root / file[1] for root in (folder, HERE) if (root / file[1]).exists())
        text = path.read_text()
    return {
        name: f"{template or ''}constexpr int launch_bound_of_{name} = "
        f"::emulator::launch_bound({bounds});"
        for template, bounds, name in _BOUNDED.findall(text)
    }


def _load(kernels: Sequence[Kernel], path: Path, sanitize: str) -> None:
    library = ctypes.CDLL(str(path))
    library.emulator_signature.restype = ctypes.c_char_p
    library.emulator_launch.restype = ctypes.c_char_p
    library.emulator_launch.argtypes = [
        *(ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)),
        *(ctypes.c_uint64, ctypes.c_int),
    ]
    for index, kernel in enumerate(kernels):
        parameters = library.emulator_signature(index).decode().split()
        _functions[sanitize, kernel.expression] = Function(library, index, tuple(parameters))


@functools.cache
def _compiler_version() -> str:
    return subprocess.check_output(["g++", "--version"], text=True)


@functools.cache
def _digest(folder: Path) -> str:
    """Of all files that a kernel may include."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".h", ".cuh", ".cu", ".ld", ""):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _cache() -> Path:
    """Returns a folder that nobody else can write to: what is in it will be run."""
    folder = Path(tempfile.gettempdir(), f"gpuopt-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise KernelError(f"{folder} can be written by others: remove it")
    return folder
