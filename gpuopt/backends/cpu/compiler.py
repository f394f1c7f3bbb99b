"""Builds C++ with this machine's compiler, and keeps the libraries in a cache."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path

from gpuopt import environment
from gpuopt.atomic_file import (
    CAREFULLY,
    remove_abandoned,
    replace_file,
    this_user,
    write_all,
)
from gpuopt.rules.sources import digest, on_disk
from gpuopt.temporary_folder import TemporaryFolder

_logger = logging.getLogger("gpuopt")

_DIGEST_BYTES = hashlib.sha256().digest_size
_serials = itertools.count()
# A compilation takes seconds.
_DEADLINE_S = 600.0
# For the end of a compiler that was killed, which may hang in a file system.
_END_S = 1.0
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    # The widest registers of this processor; no other processor uses the library.
    "-march=native",
    # Each operation rounds, as numpy's do. errno and floating-point exceptions are not read.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    # A rule's branch on a scalar is moved out of the loop over elements.
    "--param",
    "max-unswitch-insns=400",
    "-w",
    "-shared",
    "-fPIC",
)


def cache_folder() -> Path | None:
    """Returns the folder of libraries: GPUOPT_CACHE_DIR, or `gpuopt` in the user's cache folder.

    None if the folder cannot be written to.
    """
    given = environment.settings()
    return _writable_folder(given.cache_folder, given.users_cache_folder)


def read_library(path: Path, key: bytes) -> bytes | None:
    """Returns the library that `write_library` has written with this key.

    None if there is no such file, if its bytes have changed, or if others than this user and root
    may have written it.

    Args:
        path: The file.
        key: Stands for everything that the library was built from.
    """
    try:
        everything = _read_own(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _logger.warning("%s is not used, and built again: %s", path, error.strerror or error)
        return None
    content, digest = everything[:-_DIGEST_BYTES], everything[-_DIGEST_BYTES:]
    if digest != _digest(key, content):
        _logger.warning("%s is not what was built, and is built again", path)
        return None
    return content


def write_library(path: Path, key: bytes, content: bytes) -> None:
    """Writes a library for `read_library`, in full or not at all."""
    try:
        remove_abandoned(path.parent, re.compile(re.escape(path.name)))
        replace_file(path, content + _digest(key, content), permissions=0o644)
    except OSError as error:
        _logger.warning("%s cannot be kept, and is built again next time: %s", path, error)


def load(content: bytes) -> ctypes.CDLL:
    """Loads a library from memory: it cannot change between its check and its use.

    Raises:
        OSError: the system cannot load it.
    """
    if hasattr(os, "memfd_create"):
        try:
            return _load_from_memory(content)
        except OSError as error:
            _logger.debug("a library is loaded from a file, not from memory: %s", error)
    with TemporaryFolder() as folder:
        library = folder / "library.so"
        library.write_bytes(content)
        return ctypes.CDLL(str(library))


def _read_own(path: Path) -> bytes:
    """Reads a file that no other user can have written.

    Raises:
        OSError: it cannot be read, or another user could have written it.
    """
    descriptor = os.open(path, os.O_RDONLY | CAREFULLY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no file")
        # Where the system knows no such owners and permissions, there is nothing to look at.
        is_writable = os.name == "posix" and found.st_mode & 0o022
        if found.st_uid not in (0, this_user()) or is_writable:
            raise OSError("others may have written it")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


@cache
def _writable_folder(own: str, users: str) -> Path | None:
    try:
        folder = Path(own) if own else Path(users or Path.home() / ".cache") / "gpuopt"
        folder = folder.absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None


def _load_from_memory(content: bytes) -> ctypes.CDLL:
    with open(os.memfd_create("gpuopt"), "wb", buffering=0) as memory:
        write_all(memory, content)
        # For a path that it has loaded before, the system returns the library of that time.
        return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_serials)}{memory.fileno()}")


def _digest(key: bytes, content: bytes) -> bytes:
    return hashlib.sha256(key + content).digest()


def why_not_compiled() -> str | None:
    """Returns why rules run as numpy calls here, or None if they are compiled."""
    if not environment.settings().compiled:
        return "GPUOPT_COMPILED is 0"
    return None if compiler() else "no C++ compiler was found; CXX may name one"


def compiler() -> Sequence[str] | None:
    """Returns the command that CXX names, with its path, or else the first compiler found."""
    given = environment.settings()
    return _find_compiler(given.compiler, given.search_path)


@cache
def _find_compiler(named: tuple[str, ...], search_path: str) -> Sequence[str] | None:
    """Cached: every large step asks."""
    for command in [named] if named else [(name,) for name in _COMPILERS]:
        path = shutil.which(command[0], path=search_path)
        if path is not None:
            return path, *command[1:]
    return None


def why_compiler_fails() -> str | None:
    """Returns why the compiler that was found builds nothing, or None if it builds a library."""
    command = compiler()
    assert command is not None
    try:
        load(_compile(command, 'extern "C" int gpuopt() { return 0; }', ()))
    except OSError as error:
        first, *_ = str(error).strip().splitlines() or [""]
        return f"{shlex.join(command)} does not work as a C++ compiler: {first}"
    return None


def build(name: str, source: str, folders: Iterable[Traversable]) -> ctypes.CDLL | None:
    """Returns a shared library of C++ source.

    It is built once for a machine and a user, and then found in `cache_folder()`.

    Args:
        name: A part of the name of the library's file.
        source: The text of the program.
        folders: The folders of headers that it may include. A changed header is a new library.

    Returns:
        The library, or None if the compiler fails; its message is then logged as a warning.
    """
    command = compiler()
    if command is None:
        return None
    changed = os.stat(command[0]).st_mtime_ns
    on_path = [on_disk(folder) for folder in folders]
    headers = [digest(folder) for folder in on_path]
    inputs = (source, headers, _FLAGS, command, changed, _processor())
    key = hashlib.sha256(repr(inputs).encode()).digest()
    folder = cache_folder()
    path = None if folder is None else folder / f"{name}-{key.hex()[:16]}.so"
    content = None if path is None else read_library(path, key)
    try:
        if content is None:
            _logger.debug("building %s with %s", name, command[0])
            content = _compile(command, source, on_path)
            if path is not None:
                write_library(path, key, content)
        return load(content)
    except OSError as error:
        _logger.warning("%s cannot build %s, so numpy is used: %s", command[0], name, error)
        return None


def _compile(compiler_command: Sequence[str], source: str, folders: Sequence[Path]) -> bytes:
    """Runs the compiler and returns the library.

    Without pipes: a child that another thread forks meanwhile would have their other ends open, and
    the compiler or this thread would wait for its end.

    Raises:
        OSError: there is no such compiler, or it fails, or does not end.
    """
    with TemporaryFolder() as work:
        program, built, messages = (work / name for name in ("program.cpp", "built.so", "messages"))
        program.write_text(source, encoding="utf-8")
        includes = [f"-I{folder}" for folder in folders]
        command = [*compiler_command, *_FLAGS, *includes, str(program), "-o", str(built)]
        with open(messages, "wb") as output:
            running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Else there would be a pipe for an error of the start.
                close_fds=False,
                # The compiler's own files go with the folder, also if it is interrupted.
                env={**os.environ, "TMPDIR": str(work)},
            )
        try:
            status = running.wait(_DEADLINE_S)
        except BaseException as error:  # also Ctrl-C
            running.kill()
            with suppress(subprocess.TimeoutExpired):
                running.wait(_END_S)
            if isinstance(error, subprocess.TimeoutExpired):
                raise OSError(f"it has not ended within {_DEADLINE_S:g} s") from error
            raise
        if status != 0:
            raise OSError(messages.read_text(errors="replace") or f"it ended with {status}")
        return built.read_bytes()


@cache
def _processor() -> str:
    """Describes this processor, for the names of libraries: -march=native is for it alone.

    A home folder, and so the cache, may be shared by several machines.
    """
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kept = ("vendor_id", "model name", "flags", "CPU part", "Features", "isa")
    return "\n".join(line for line in first if line.startswith(kept))
