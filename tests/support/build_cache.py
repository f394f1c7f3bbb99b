"""Where tests keep what they have compiled, from one run to the next."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def build_cache(name: str) -> Path:
    """Returns a folder in the system's temporary one that only this user can write to.

    What is in it will be run.

    Raises:
        RuntimeError: others can write to it.
    """
    user = os.getuid() if hasattr(os, "getuid") else ""
    folder = Path(tempfile.gettempdir(), f"gpuopt-{name}-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.stat()
    if hasattr(os, "getuid") and (state.st_uid != user or state.st_mode & 0o022):
        raise RuntimeError(f"{folder} can be written by others: remove it")
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps out other threads and processes that lock the same file; the file is made."""
    import fcntl  # not on Windows, where nothing is built

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
