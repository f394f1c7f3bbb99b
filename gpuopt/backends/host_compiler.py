"""Builds C++ for this machine with the compiler that is found on it, and keeps what was built."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file
from importlib.resources.abc import Traversable
from pathlib import Path

from gpuopt.kernel_sources import kernel_root

_logger = logging.getLogger("gpuopt")

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    # Whole registers of this processor; what is built is never used on another.
    "-march=native",
    # Each operation rounds, as numpy's do, and sets no flag that anyone reads.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    # A rule's branch on a scalar is taken once, outside the loop.
    "--param",
    "max-unswitch-insns=400",
    "-w",
    "-shared",
    "-fPIC",
)


def why_not_compiled() -> str | None:
    """Says why rules run as numpy calls here, or None if they are compiled."""
    wanted = os.environ.get("GPUOPT_COMPILED", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"GPUOPT_COMPILED={wanted!r} is neither 0 nor 1")
    if wanted == "0":
        return "GPUOPT_COMPILED is 0"
    return None if compiler() else "no C++ compiler was found; CXX may name one"


def compiler() -> Sequence[str] | None:
    """Returns the command that CXX names, with its path, or else the first compiler found."""
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@cache
def _find_compiler(named: str, search_path: str) -> Sequence[str] | None:
    """Looks once, for each large step asks."""
    given = shlex.split(named)
    for command in [given] if given else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0], path=search_path)
        if path is not None:
            return path, *command[1:]
    return None


def build(name: str, source: str) -> ctypes.CDLL | None:
    """Returns a shared library of C++ source that may include the kernels' headers.

    It is built once for a machine, and then found in `cache_folder()`.

    Args:
        name: What the library's file is named after.
        source: The text of the program.

    Returns:
        The library, or None where the compiler fails; a warning then says how.
    """
    command = compiler()
    if command is None:
        return None
    changed = os.stat(command[0]).st_mtime_ns
    inputs = (source, _headers(), _FLAGS, command, changed, _processor())
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
    library = cache_folder() / f"{name}-{digest[:16]}.so"
    if not library.exists():
        _logger.debug("building %s with %s", library, command[0])
        try:
            _compile(command, source, library)
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", "") or error
            _logger.warning("%s cannot build %s, so numpy is used: %s", command[0], name, output)
            return None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        _logger.warning("%s cannot be loaded, so numpy is used: %s", library, error)
        return None


@cache
def cache_folder() -> Path:
    """Returns the folder of what was built: GPUOPT_CACHE_DIR, or `gpuopt` in the user's cache.

    Where that cannot be written to, a temporary folder.
    """
    own = os.environ.get("GPUOPT_CACHE_DIR")
    try:
        users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(own) if own else Path(users) / "gpuopt"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return Path(tempfile.mkdtemp(prefix="gpuopt-"))


def _compile(compiler_command: Sequence[str], source: str, library: Path) -> None:
    # Another process may be building the same: whoever is last replaces an equal file.
    with (
        as_file(kernel_root()) as headers,
        tempfile.TemporaryDirectory(dir=library.parent) as work,
    ):
        built = Path(work) / "built.so"
        options = [*_FLAGS, f"-I{headers}", "-x", "c++", "-", "-o", str(built)]
        command = [*compiler_command, *options]
        subprocess.run(command, input=source, text=True, check=True, capture_output=True)
        os.replace(built, library)


@cache
def _headers() -> str:
    """All that a source may include: a changed header is a new library."""

    def texts(folder: Traversable) -> list[str]:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
        return [
            text
            for entry in entries
            for text in (texts(entry) if entry.is_dir() else [entry.read_text()])
        ]

    return "\0".join(texts(kernel_root()))


@cache
def _processor() -> str:
    """What sets this processor apart: a home folder may be shared among machines."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kept = ("vendor_id", "model name", "flags", "CPU part", "Features", "isa")
    return "\n".join(line for line in first if line.startswith(kept))
