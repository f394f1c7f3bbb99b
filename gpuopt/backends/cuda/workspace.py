"""Device memory that sparse updates work in: it grows to the largest one, and stays."""

from __future__ import annotations

from typing import Any

from gpuopt.backends.cuda.launcher import Launcher

_NUM_DIGITS = 256


class Workspace:
    """Buffers by name, for one stream of one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._buffers: dict[tuple[str, str], Any] = {}

    def take(self, name: str, size: int, dtype: str) -> Any:
        """Returns `size` elements of the buffer `name`, of whatever values it last had."""
        found = self._buffers.get((name, dtype))
        if found is None or found.size < size:
            found = self._launcher.xp.empty(max(1, size), dtype=dtype)
            self._buffers[name, dtype] = found
        return found[:size] if found.size != size else found

    def zeros(self, name: str, size: int, dtype: str) -> Any:
        """Returns the buffer `name`, zero when it is made; whoever writes to it clears it again."""
        found = self._buffers.get((name, dtype))
        if found is None or found.size < size:
            found = self._launcher.xp.zeros(max(1, size), dtype=dtype)
            self._buffers[name, dtype] = found
        return found
