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

    The order is that of the times in the files' headers; nothing else is read. Files whose header
    shows that they are damaged are logged and left out.
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
    """Returns the time for the folder's next checkpoint: now, but later than all in the folder.

    So the order of checkpoints is right even if the clock is set back. Once a file has the latest
    time that 64 bits can hold, as a forged one may, files are ordered by their time of writing.
    """
    if folder not in _newest:
        _newest[folder] = max(checkpoint_files(folder).values(), default=0)
    _newest[folder] = min(max(time.time_ns(), _newest[folder] + 1), LATEST_TIME)
    return _newest[folder]
