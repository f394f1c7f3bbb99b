"""Device memory that sparse updates work in: it grows to the largest one, and stays."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cuda.launcher import Launcher

_NUM_DIGITS = 256


class Workspace:
    """Buffers by name, for one stream of one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._buffers: dict[tuple[str, str], Any] = {}
        self._constants: dict[str, tuple[bytes, Any]] = {}

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

    def constants(self, name: str, values: np.ndarray[Any, Any]) -> Any:
        """Returns a device array of these values, uploaded if they have changed."""
        found = self._constants.get(name)
        as_bytes = values.tobytes()
        if found is not None and found[0] == as_bytes and found[1].dtype == values.dtype:
            return found[1]
        target = self.take(name, values.size, values.dtype.name)
        self._launcher.upload(target, values)
        self._constants[name] = as_bytes, target
        return target
