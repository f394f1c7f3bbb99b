"""Files that appear in full or not at all: written under a temporary name, and then renamed."""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

_TOKEN_BYTES = 8
_ASIDE = re.compile(rf"\.(?P<target>.+)\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.partial", re.DOTALL)
# Error numbers of file systems that cannot sync a folder, as some network file systems.
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})
# To open a file that others may have put there: do not follow a symbolic link, do not wait for the
# other end of a pipe, and do not change ends of lines. Each system has some of these.
CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class AsideFile(io.FileIO):
    """A file that one process writes; see `open_aside`."""

    def __init__(self, name: Path, permissions: int) -> None:
        """Makes the file.

        Raises:
            FileExistsError: something has this name.
        """
        # "x": the file is made, or it is an error; a link is not followed.
        super().__init__(str(name), "x+b", opener=partial(os.open, mode=permissions))
        self._process = os.getpid()

    def is_this_processes(self) -> bool:
        return os.getpid() == self._process

    def write(self, content: Any) -> int:
        self._refuse_fork()
        return super().write(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # The processes share the position. To close a buffer around this file may move it, too.
        self._refuse_fork()
        return super().seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        self._refuse_fork()
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        self._refuse_fork()
        return super().read(-1 if size is None else size)

    def take_name(self, path: Path) -> None:
        """Renames the file."""
        self._refuse_fork()
        os.replace(str(self.name), path)

    def _refuse_fork(self) -> None:
        if not self.is_this_processes():
            raise RuntimeError(
                f"process {self._process} is writing {self.name}, and this process was forked from "
                "it meanwhile: the file is left to it"
            )


@contextmanager
def open_aside(path: Path, permissions: int = 0o666) -> Iterator[AsideFile]:
    """Makes a new, unbuffered file beside `path`, for the content that `path` is to get.

    The caller syncs the file and has it `take_name(path)`. If the body raises, the file is
    removed; the file of a process that was killed is removed by `remove_abandoned`. The file's name
    is random and new, so no file of anybody else is opened. The file is locked while it is open, so
    that `remove_abandoned` leaves it alone. A forked child of this process can neither write nor
    rename it, and does not remove it.

    Args:
        path: The file that the new one is named after.
        permissions: The new file's permission bits, before the process's umask is applied.
    """
    process = os.getpid()
    made: list[Path] = []
    try:
        with _new_locked(path, permissions, made) as file:
            yield file
    except BaseException:
        if os.getpid() == process:
            for name in made:
                with suppress(OSError):
                    os.unlink(name)
        raise


def replace_file(path: Path, content: bytes, permissions: int = 0o666) -> None:
    """Replaces the content of `path`, atomically and durably.

    Raises:
        OSError: the file could not be written; what was at `path` is as it was.
    """
    with open_aside(path, permissions) as file:
        write_all(file, content)
        os.fsync(file.fileno())
        file.take_name(path)
    sync_folder(path.parent)


def write_all(file: io.RawIOBase, content: Any) -> None:
    """Writes all bytes to an unbuffered file, which may take fewer at a time."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def sync_folder(folder: Path) -> None:
    """Has the names in a folder survive a power cut, where the system can do so.

    Raises:
        OSError: the disk failed.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` is the name of an open file now, and not of a newer one."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def aside_name(path: Path) -> Path:
    """Returns a name beside `path` that nobody else uses, and `remove_abandoned` knows."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.partial")


def remove_abandoned(folder: Path, targets: re.Pattern[str]) -> bool:
    """Removes this user's temporary files that no process has open any more.

    Returns whether none is left.

    Args:
        folder: The folder to search.
        targets: The names that the files were to be renamed to.
    """
    none_is_left = True
    for name in os.listdir(folder):
        aside = _ASIDE.fullmatch(name)
        if aside is not None and targets.fullmatch(aside["target"]):
            with suppress(OSError):
                _remove_unless_open(folder / name)
            none_is_left &= not os.path.lexists(folder / name)
    return none_is_left


def this_user() -> int:
    """Returns the number of the user whose files this process makes; 0 where files have none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def _new_locked(path: Path, permissions: int, made: list[Path]) -> AsideFile:
    """Makes a file under a new name, which is added to `made` before: Ctrl-C may come after it."""
    while True:
        aside = aside_name(path)
        made.append(aside)
        try:
            file = AsideFile(aside, permissions)
        except FileExistsError:
            made.remove(aside)
            continue
        # Before it was locked, another process may have removed it as abandoned.
        if _lock(file.fileno()) is not False and is_at(file.fileno(), aside):
            return file
        file.close()


def _remove_unless_open(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | CAREFULLY)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_uid == this_user() and _lock(descriptor):
            os.unlink(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Returns whether the file could be locked; None where there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
