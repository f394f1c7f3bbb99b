"""The checkpoints of a folder, in the order in which they were saved."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from gpuopt.checkpoint.checkpoint_file import open_checkpoint
from gpuopt.checkpoint.file_format import LATEST_TIME, SUFFIX
from gpuopt.errors import CheckpointError

_logger = logging.getLogger("gpuopt")

# By folder: the time of the newest checkpoint that this process knows of.
_newest: dict[Path, int] = {}


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Returns the path of the folder's newest checkpoint, or None if there is none.

    The files themselves say when they were saved; nothing but their headers is read. Files that
    are damaged so far that it shows there are logged and left out.
    """
    folder = Path(checkpoint_dir)
    found = list(checkpoint_files(folder)) if folder.is_dir() else []
    return str(found[-1]) if found else None


def checkpoint_files(folder: Path) -> dict[Path, int]:
    """Finds the folder's checkpoints and when they were saved, the newest last.

    Files that are no checkpoints, or are cut short, are logged and left out.
    """
    found: list[tuple[int, int, Path]] = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            with open_checkpoint(path) as checkpoint:
                found.append((checkpoint.saved_at, checkpoint.written_at, path))
        except FileNotFoundError:
            continue  # removed meanwhile
        except (OSError, CheckpointError) as error:
            _logger.warning("not counted as a checkpoint: %s", error)
    return {path: saved_at for saved_at, _, path in sorted(found)}


def next_time(folder: Path) -> int:
    """Returns the time for the folder's next checkpoint: now, but later than those there are.

    Clocks are set back at times; the order of checkpoints must not be. Where the times have come
    to their end, as a forged file may have it, files are in the order in which they were written.

    Args:
        folder: Its path without links.
    """
    if folder not in _newest:
        _newest[folder] = max(checkpoint_files(folder).values(), default=0)
    _newest[folder] = min(max(time.time_ns(), _newest[folder] + 1), LATEST_TIME)
    return _newest[folder]
