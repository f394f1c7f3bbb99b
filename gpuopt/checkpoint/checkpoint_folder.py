"""The checkpoints of a folder, in the order of their saves, and which of them are kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpuopt.atomic_file import aside_name
from gpuopt.checkpoint.checkpoint_file import CheckpointFile, open_checkpoint
from gpuopt.checkpoint.file_format import LATEST_TIME, SUFFIX
from gpuopt.errors import CheckpointError
from gpuopt.locks import renew_after_fork

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


class KeptCheckpoint(NamedTuple):
    """One checkpoint.

    Attributes:
        spelled: The path as the user wrote it, which may be relative, or lead through links.
        file: The path from the root, without links.
        fingerprint: The file's `CheckpointFile.fingerprint`; another file may have the path by now.
        saved: When the checkpoint was saved, in seconds since 1970.
    """

    spelled: str
    file: Path
    fingerprint: str
    saved: float


class KeptCheckpoints:
    """Removes old checkpoints, but no file that was not added here."""

    def __init__(self, max_to_keep: int | None, keep_every_hours: float) -> None:
        """Keeps the limits.

        Args:
            max_to_keep: How many are kept; None or 0 keeps all.
            keep_every_hours: Of those to be removed, one in so many hours stays.
        """
        self._max_to_keep = max_to_keep
        self._keep_every_s = keep_every_hours * 3600
        self._keep_next_after = time.time() + self._keep_every_s
        self._kept: list[KeptCheckpoint] = []
        # Of saves that are not done yet.
        self._expected: list[KeptCheckpoint] = []
        renew_after_fork(self)

    @property
    def paths(self) -> list[str]:
        """The checkpoints' paths as the user wrote them, the newest last."""
        return [kept.spelled for kept in self._with_expected()]

    def replace_all(self, paths: Iterable[str]) -> None:
        """Keeps these checkpoints instead, the newest last; files that are none are logged."""
        found: dict[Path, KeptCheckpoint] = {}
        for path in paths:
            try:
                file = Path(path).resolve()
                with open_checkpoint(file) as checkpoint:
                    seconds = checkpoint.written_at / 1e9
                    found.pop(file, None)
                    found[file] = KeptCheckpoint(path, file, checkpoint.fingerprint, seconds)
            except FileNotFoundError:
                continue
            except (OSError, CheckpointError) as error:
                _logger.warning("not counted as a checkpoint: %s", error)
        self._kept[:] = found.values()

    def expect(self, spelled: str, file: Path, fingerprint: str) -> KeptCheckpoint:
        """Counts a new checkpoint once it is there, also if Ctrl-C ends its save just then."""
        new = KeptCheckpoint(spelled, file, fingerprint, time.time())
        self._expected.append(new)
        return new

    def confirm(self, fingerprint: str) -> None:
        """Counts an expected checkpoint that is there now; removes those that are too many."""
        self._count(fingerprint)
        while self._max_to_keep and len(self._kept) > self._max_to_keep:
            oldest = self._kept[0]
            if oldest.saved > self._keep_next_after:
                self._keep_next_after += self._keep_every_s
            else:
                try:
                    _remove(oldest)
                except OSError as error:
                    _logger.warning("an old checkpoint could not be removed: %s", error)
                    return  # it is tried again after the next save
            _discard(self._kept, oldest)

    def end(self, expected: Iterable[KeptCheckpoint]) -> None:
        """Expects these checkpoints no more: their save has failed. One that is there counts."""
        self._count()
        for new in expected:
            _discard(self._expected, new)

    def _count(self, confirmed: str = "") -> None:
        for new in self._expected.copy():
            if new.fingerprint == confirmed or _is_there(new):
                self._kept[:] = [kept for kept in self._kept if kept.file != new.file] + [new]
                _discard(self._expected, new)

    def after_fork(self) -> None:
        """The checkpoints so far are left to the parent."""
        self._kept, self._expected = [], []

    def _with_expected(self) -> list[KeptCheckpoint]:
        """Lists what is kept, with those expected checkpoints that are there."""
        kept = self._kept.copy()
        for new in self._expected.copy():
            if _is_there(new):
                # Of one file with two names, the older content is gone.
                kept = [*(entry for entry in kept if entry.file != new.file), new]
        return kept


def _discard(kept: list[KeptCheckpoint], entry: KeptCheckpoint) -> None:
    with suppress(ValueError):
        kept.remove(entry)


def _is_there(kept: KeptCheckpoint) -> bool:
    try:
        with open_checkpoint(kept.file) as checkpoint:
            return checkpoint.fingerprint == kept.fingerprint
    except (OSError, CheckpointError):
        return False


def _remove(kept: KeptCheckpoint) -> None:
    """Removes a checkpoint, unless another file has its path by now.

    Raises:
        OSError: the file could not be removed.
    """
    try:
        with open_checkpoint(kept.file) as checkpoint:
            if checkpoint.fingerprint == kept.fingerprint:
                _remove_this(checkpoint)
                return
        reason = "it is another checkpoint now"
    except FileNotFoundError:
        return
    except CheckpointError as error:
        reason = str(error)
    _logger.warning("%s is kept, though it is old: %s", kept.file, reason)


def _remove_this(checkpoint: CheckpointFile) -> None:
    """Removes an opened file, but not a newer file that gets the same path meanwhile."""
    taken = aside_name(checkpoint.path)
    os.rename(checkpoint.path, taken)
    try:
        if checkpoint.is_at(taken):
            os.unlink(taken)
        else:
            _put_back(taken, checkpoint.path)
    except OSError:
        _put_back(taken, checkpoint.path)
        raise


def _put_back(taken: Path, path: Path) -> None:
    """Renames a file back to its path, unless a newer file has that path by now."""
    try:
        os.link(taken, path)
    except FileExistsError:
        pass
    except OSError:  # the file system has no links
        os.rename(taken, path)
        return
    os.unlink(taken)
