"""Device memory that sparse updates work in, as much as the largest has needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of


class Workspace:
    """Buffers by name, for one stream of one device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._buffers: dict[tuple[str, str], Any] = {}
        self._constants: dict[str, tuple[bytes, Any]] = {}

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

    def constants(self, name: str, values: np.ndarray[Any, Any]) -> Any:
        """Returns the buffer `name` with these values, which are uploaded if they have changed."""
        found = self._constants.get(name)
        as_bytes = values.tobytes()
        if found is not None and found[0] == as_bytes and found[1].dtype == values.dtype:
            return found[1]
        target = self.take(name, values.size, name_of(values.dtype))
        self._constants.pop(name, None)  # until the upload is done
        self._launcher.upload(target, values)
        self._constants[name] = as_bytes, target
        return target
