"""Device memory that sparse updates work in, as much as the largest has needed."""

from __future__ import annotations

from typing import Any

from gpuopt.backends.cuda.launcher import Launcher


class Workspace:
    """Buffers by name, for one stream of one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._buffers: dict[tuple[str, str], Any] = {}

    def take(self, name: str, size: int, dtype: str) -> Any:
        """Returns the first `size` elements of a buffer, with the values that they last had."""
        found = self._buffers.get((name, dtype))
        if found is None or found.size < size:
            found = self._launcher.xp.empty(max(1, size), dtype=dtype)
            self._buffers[name, dtype] = found
        return found[:size] if found.size != size else found

    def zeros(self, name: str, size: int, dtype: str) -> Any:
        """Returns a buffer of at least `size` elements, all zero.

        They are zeroed when the buffer is allocated; the update that writes to them zeroes them
        again.
        """
        found = self._buffers.get((name, dtype))
        if found is None or found.size < size:
            found = self._launcher.xp.zeros(max(1, size), dtype=dtype)
            self._buffers[name, dtype] = found
        return found
