"""Where tests keep what they have compiled, from one run to the next."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

# Of a few kernels with a sanitizer, on a busy machine.
LONGEST_BUILD_S = 180.0


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


def built(
    file: Path, command: Sequence[str], source: str, environment: Mapping[str, str] | None = None
) -> Path:
    """Has a compiler make a file, unless it is there; of several processes that need it, one does.

    Args:
        file: Named by all that goes into it.
        command: What makes it, but for `-o FILE`.
        source: Given to the command.
        environment: The command's; None for this process's.

    Raises:
        RuntimeError: with what the compiler has to say.
    """
    if file.exists():
        return file
    with locked(file.with_suffix(".lock")):
        if file.exists():
            return file
        # A process that is killed leaves nothing that looks finished.
        unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
        result = subprocess.run(
            [*command, "-o", str(unfinished)],
            input=source,
            capture_output=True,
            text=True,
            env=environment,
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} fails:\n{result.stderr}")
        unfinished.rename(file)
    return file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Has other threads and processes that lock the same file wait; the file is made.

    It only saves them from building the same at once. A process that hangs may keep the lock for
    ever, so nobody waits longer than a build takes, and who has waited so long builds, too.
    """
    import fcntl  # not on Windows, where nothing is built

    with path.open("w") as file:
        deadline = time.monotonic() + LONGEST_BUILD_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield
