"""Built libraries on the disk: one is loaded only if no byte has changed since it was built."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import os
import re
import stat
import tempfile
from functools import cache
from pathlib import Path

from gpuopt import environment
from gpuopt.atomic_file import (
    CAREFULLY,
    remove_abandoned,
    replace_file,
    this_user,
    write_all,
)
from gpuopt.temporary_folder import TemporaryFolder

_logger = logging.getLogger("gpuopt")

_DIGEST_BYTES = hashlib.sha256().digest_size
_serials = itertools.count()


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
