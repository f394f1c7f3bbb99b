"""Kernels as functions of this process: compiled by g++, kept on disk, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from build_cache import build_cache, built
from cuda_headers import cuda_headers

from emulator.sanitized import RUNTIMES
from gpuopt.backends.cuda.availability import installed
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.rules.sources import kernel_root, on_disk

HERE = Path(__file__).resolve().parent

FLAGS = [
    "-std=c++20",
    "-Og",  # -O1 takes 1.7 times as long
    # As by NVRTC: only what says so is a fused multiply-add, and memory is read as whatever type.
    "-mfma",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    # The fortified setjmp and longjmp refuse to switch stacks.
    "-U_FORTIFY_SOURCE",
    "-fPIC",
    # NVRTC's warnings are those that count.
    "-w",
    "-fdata-sections",
    # What is needed of libraries is there already: to find it takes ten times as long as to link.
    "-nostdlib",
]
SANITIZER_FLAGS = {
    "": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"],
    "thread": ["-fsanitize=thread", "-g1"],
}
# So many take g++ about 2 seconds, and 8 with AddressSanitizer.
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


@dataclass(frozen=True)
class Function:
    """A compiled kernel."""

    library: ctypes.CDLL
    index: int

    def launch(
        self, num_blocks: int, num_threads: int, arguments: int, seed: int, strict: bool
    ) -> str | None:
        """Runs the kernel to its end; returns what went wrong, if anything did.

        Args:
            num_blocks, num_threads: The launch's shape.
            arguments: Where the addresses of the arguments are, as CUDA's driver takes them.
            seed, strict: See `EmulatorLauncher`.
        """
        with _launching:
            report = self.library.emulator_launch(
                self.index, num_blocks, num_threads, arguments, seed, strict
            )
            return None if report is None else report.decode()


Key = tuple[str, Sequence[Path], str, str]

# By sanitizer, folders of headers, source and expression.
_functions: dict[Key, Function] = {}


def _key(kernel: Kernel, sanitize: str) -> Key:
    return sanitize, _folders(kernel), kernel.source, kernel.expression


def _folders(kernel: Kernel) -> Sequence[Path]:
    return tuple(map(on_disk, kernel.include_folders))


def find(kernel: Kernel, sanitize: str) -> Function:
    """Returns the function; compiles it, alone, if nothing has yet."""
    key = _key(kernel, sanitize)
    if key not in _functions:
        compile_all([kernel], sanitize)
    return _functions[key]


def compile_all(kernels: Iterable[Kernel], sanitize: str) -> None:
    """Compiles what is neither here nor on disk, on all cores.

    The next run finds each kernel by itself, whichever it was compiled together with.

    Raises:
        KernelError: with what g++ has to say; or Python and C++ name a parameter differently.
    """
    if sanitize and RUNTIMES[sanitize][0] not in os.environ.get("LD_PRELOAD", ""):
        raise KernelError(
            f"the {sanitize} sanitizer must be there when Python starts: "
            "see tests/support/emulator/sanitized.py"
        )
    missing = {_key(kernel, sanitize): kernel for kernel in kernels}
    missing = {key: kernel for key, kernel in missing.items() if key not in _functions}
    by_origin: dict[tuple[Sequence[Path], str], list[Kernel]] = {}
    for _, kernel in sorted(missing.items()):
        check_names(kernel)
        origin = _folders(kernel), kernel.own_file
        by_origin.setdefault(origin, []).append(kernel)
    batches = [
        group[start : start + KERNELS_PER_LIBRARY]
        for group in by_origin.values()
        for start in range(0, len(group), KERNELS_PER_LIBRARY)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lambda batch: _find_or_compile(batch, sanitize), batches):
            _functions.update(found)


def _find_or_compile(batch: Sequence[Kernel], sanitize: str) -> dict[Key, Function]:
    """Compiles what is not on disk; processes that do so at once have the same batches."""
    found = {kernel: _find_on_disk(kernel, sanitize) for kernel in batch}
    lacking = [kernel for kernel, function in found.items() if function is None]
    if lacking:
        path = _compile(lacking, sanitize)
        for index, kernel in enumerate(lacking):
            found[kernel] = Function(_load(path), index)
            _note_place(kernel, sanitize, f"{path.name} {index}")
    return {_key(kernel, sanitize): function for kernel, function in found.items() if function}


def _find_on_disk(kernel: Kernel, sanitize: str) -> Function | None:
    try:
        name, index = _place_of(kernel, sanitize).read_text().split()
        return Function(_load(build_cache("emulator") / name), int(index))
    except OSError:  # one of both files is not there
        return None


def _note_place(kernel: Kernel, sanitize: str, text: str) -> None:
    place = _place_of(kernel, sanitize)
    unfinished = place.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(place)


def _place_of(kernel: Kernel, sanitize: str) -> Path:
    """Returns the file that names the kernel's library, and its number there."""
    source = f"{kernel.source}\0{kernel.expression}"
    flags = [*FLAGS, *SANITIZER_FLAGS[sanitize]]
    return build_cache("emulator") / f"{_name(flags, source, (*_folders(kernel), HERE))}.place"


def _compile(kernels: Sequence[Kernel], sanitize: str) -> Path:
    """Compiles kernels of one file, whose rules are from one folder."""
    source, folders = _source(kernels), (*_folders(kernels[0]), HERE)
    flags = [*FLAGS, *SANITIZER_FLAGS[sanitize], f"-isystem{cuda_headers()}"]
    header = _precompiled(flags)
    command = ["g++", *flags, *_named(folders), "-include", str(header.with_suffix(""))]
    command += ["-shared", f"-Wl,-T,{HERE / 'shared_memory.ld'}", "-x", "c++", "-"]
    return _built(build_cache("emulator") / f"{_name(flags, source, folders)}.so", command, source)


def _precompiled(flags: Sequence[str]) -> Path:
    """Compiles the emulator's header, which takes longer than a kernel."""
    folder = build_cache("emulator") / _name(flags, "", [HERE])
    folder.mkdir(exist_ok=True)
    command = ["g++", *flags, *_named([HERE]), "-x", "c++-header", str(HERE / "cuda_emu.h")]
    return _built(folder / "cuda_emu.h.gch", command, "")


def _named(folders: Sequence[Path]) -> list[str]:
    """Returns the flags for folders of headers: a sanitizer's stacks have names, not paths."""
    return [
        flag
        for folder in folders
        for flag in (f"-I{folder}", f"-ffile-prefix-map={folder}={folder.name}")
    ]


def _built(file: Path, command: Sequence[str], source: str) -> Path:
    """Has g++ make a file; it is not to be run with a sanitizer itself.

    Raises:
        KernelError: with what g++ has to say.
    """
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        return built(file, command, source, environment)
    except RuntimeError as error:
        raise KernelError(f"g++ does not compile the kernels:\n{error}") from None


def _name(flags: Sequence[str], source: str, folders: Sequence[Path]) -> str:
    """Names a library by all that goes into it.

    Not by where the folders are: copies of the project share their libraries.
    """
    everything = [
        _compiler_version(),
        str(installed("nvidia-cuda-runtime")),
        *flags,
        source,
        *map(_digest, folders),
    ]
    return hashlib.sha256("\0".join(everything).encode()).hexdigest()[:32]


def _source(kernels: Sequence[Kernel]) -> str:
    """A translation unit for kernels of one file, with the headers that any of them needs."""
    definitions = dict.fromkeys(each for kernel in kernels for each in kernel.definitions)
    structs = dict.fromkeys(piece for kernel in kernels for piece in kernel.struct)
    assertions = dict.fromkeys(line for kernel in kernels for line in kernel.assertions)
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
            # See shared_memory.ld. Headers of the system are not to end up in it: cuda_emu.h, which
            # is there already, has included all that kernels may use.
            "namespace {",
            *definitions,
            f'#include "{kernels[0].own_file}"',
            *structs,
            *assertions,
            "namespace gpuopt {",
            *bounds.values(),
            "}",
            "}",
            f"EMULATOR_KERNELS({', '.join(entries)})\n",
        ]
    )


_FUNCTION = re.compile(
    r"(?P<template>template\s*<[^{};()]*>\s*)?__global__\s+void\s+"
    r"(?:__launch_bounds__\((?P<bounds>[^{};]*?)\)\s*)?"
    r"(?P<name>\w+)\s*\((?P<parameters>[^{};()]*)\)\s*{"
)


def _functions_in(kernel: Kernel) -> dict[str, re.Match[str]]:
    """Finds the kernels of a kernel's file, by name."""
    file = kernel.own_file
    roots = (on_disk(kernel_root()), HERE)
    path = next(root / file for root in roots if (root / file).exists())
    return {found["name"]: found for found in _FUNCTION.finditer(path.read_text())}


def _launch_bounds(kernel: Kernel) -> dict[str, str]:
    """Returns definitions of the first launch bound of each function in the kernel's file."""
    return {
        name: f"{found['template'] or ''}constexpr int launch_bound_of_{name} = "
        f"::emulator::launch_bound({found['bounds']});"
        for name, found in _functions_in(kernel).items()
        if found["bounds"] is not None
    }


def check_names(kernel: Kernel) -> None:
    """Refuses a kernel whose parameters have other names in C++ than in Python.

    Their number and types are the compiler's to check.

    Raises:
        KernelError: the names differ.
    """
    found = _functions_in(kernel).get(kernel.function)
    if found is None:
        raise KernelError(f"{kernel.own_file} has no kernel {kernel.function}")
    in_cpp = re.findall(r"(\w+)\s*(?:,|$)", re.sub(r"<[^<>]*>", "", found["parameters"]))
    if in_cpp != list(kernel.parameters):
        raise KernelError(
            f"the parameters of {kernel.expression} are {', '.join(kernel.parameters)} in Python, "
            f"and {', '.join(in_cpp)} in C++"
        )


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.emulator_launch.restype = ctypes.c_char_p
    library.emulator_launch.argtypes = [
        *(ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p),
        *(ctypes.c_uint64, ctypes.c_int),
    ]
    return library


@functools.cache
def _compiler_version() -> str:
    return subprocess.check_output(["g++", "--version"], text=True)


@functools.cache
def _digest(folder: Path) -> str:
    """Returns a digest of all files in a folder but Python's."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
