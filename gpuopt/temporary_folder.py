"""Temporary folders, removed when the process that made them ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path


class TemporaryFolder:
    """A new folder, removed at the end of a `with` statement, of this object, or of the process.

    tempfile.TemporaryDirectory would do, but a forked child that ends removes the folders in which
    its parent's threads are at work.

    Attributes:
        path: The folder's.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="gpuopt-"))
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self._remove()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
