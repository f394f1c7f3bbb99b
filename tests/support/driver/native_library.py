"""Compiles the driver's C++ and loads it as the libcuda.so.1 of this process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from build_cache import build_cache, built
from cuda_headers import cuda_headers

NATIVE = Path(__file__).resolve().parent / "native"
LIBRARIES = NATIVE / "libraries"
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-shared"),
    # The fortified setjmp and longjmp refuse to switch stacks.
    "-U_FORTIFY_SOURCE",
]


def build(name: str, command: Sequence[str], inputs: Sequence[str] = (), stdin: str = "") -> Path:
    """Runs a command that writes the file `name`, unless it is there from an earlier run.

    Args:
        name: Its ending is kept; before it comes a digest of all that goes into it.
        command: What makes the file, but for `-o FILE`.
        inputs: Texts or digests that the command depends on besides.
        stdin: Given to the command.

    Raises:
        RuntimeError: with what the compiler has to say.
    """
    everything = "\0".join([compiler_version(), *command, stdin, *inputs])
    digest = hashlib.sha256(everything.encode()).hexdigest()[:24]
    folder = build_cache("driver") / digest
    folder.mkdir(exist_ok=True)
    return built(folder / name, command, stdin)


@functools.cache
def compiler_version() -> str:
    # Asking takes longer than everything else in a process that has nothing to compile.
    version = build_cache("driver") / "compiler"
    compiler = Path("/usr/bin/g++").resolve()
    key = f"{compiler} {compiler.stat().st_mtime_ns if compiler.exists() else 0}\n"
    if not version.exists() or not version.read_text().startswith(key):
        version.write_text(key + subprocess.check_output(["g++", "--version"], text=True))
    return version.read_text()


def digest_of(folder: Path, pattern: str = "*") -> str:
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


class MissingHeadersError(Exception):
    """NVIDIA's headers are not installed."""


def headers() -> str:
    folder = cuda_headers()
    if folder is None:
        raise MissingHeadersError(
            "the stub driver needs the headers of nvidia-cuda-runtime and nvidia-cuda-crt: "
            "pip install 'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-crt>=13,<14'"
        )
    return f"-isystem{folder}"


def shared_library(
    soname: str,
    sources: Sequence[Path],
    text: str,
    inputs: Sequence[Path] = (),
    is_part: bool = True,
) -> Path:
    """Compiles a library that others find under this name.

    Args:
        soname: The name.
        sources: Its source files.
        text: The text of one more.
        inputs: Files that it includes, beside headers.
        is_part: Whether this is the driver; if not, it calls the driver.
    """
    files = (*sources, *inputs, *sorted(NATIVE.rglob("*.h")))
    command = ["g++", *FLAGS, f"-I{NATIVE}", headers(), f"-Wl,-soname,{soname}"]
    # As the real ones, whose names are the versions of their symbols.
    command += ["-Wl,--default-symver", *map(str, sources), "-x", "c++", "-"]
    if not is_part:
        command += ["-x", "none", str(compiled())]
    return build(soname, command, [path.read_text() for path in files], text)


def compiled() -> Path:
    """Compiles the driver, unless it is there from an earlier run.

    Raises:
        MissingHeadersError: NVIDIA's headers are not installed.
    """
    sources = sorted(NATIVE.glob("*.cpp"))
    # As one: what they include takes g++ longer than they themselves.
    text = "".join(f'#include "{path.name}"\n' for path in sources)
    return shared_library("libcuda.so.1", [], text, sources)


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the driver, loaded: whoever opens libcuda.so.1 from now on gets it."""
    lib = ctypes.CDLL(str(compiled()))
    for function in ("driver_counts", "driver_take_reports", "driver_launches"):
        getattr(lib, function).restype = ctypes.c_char_p
    lib.driver_set_policy.argtypes = [ctypes.c_int, ctypes.c_uint64]
    lib.driver_next_module.argtypes = [ctypes.c_long]
    lib.driver_part_taken.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
    ]
    lib.driver_part_freed.argtypes = [ctypes.c_void_p]
    lib.driver_sort.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64),
    ]
    return lib
