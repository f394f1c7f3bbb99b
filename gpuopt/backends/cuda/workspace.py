"""Device memory that sparse updates work in, as much as the largest has needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import Launch, Launcher
from gpuopt.backends.cuda.order import MOST_STREAMS

Prepared = TypeVar("Prepared")

# Programs whose gradients have another number of rows in each step need few.
_MOST_PREPARED = 16


class Workspaces:
    """The workspaces of one device's streams."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        # The one that was used the longest ago comes first.
        self._by_stream: dict[Hashable, Workspace] = {}

    def take(self, stream: Hashable) -> Workspace:
        """Takes the current stream's out.

        After an error it is not put back: counts and bits may be set in it that no kernel will
        clear. A read by a signal handler meanwhile has another.
        """
        return self._by_stream.pop(stream, None) or Workspace(self._launcher, stream)

    def put_back(self, workspace: Workspace) -> None:
        """Keeps a workspace for the next update on its stream."""
        kept = self._by_stream
        if len(kept) == MOST_STREAMS and workspace.stream not in kept:
            # Of the stream that was used the longest ago, which may have ended. Its memory goes
            # back to that stream, behind the work that uses it.
            del kept[next(iter(kept))]
        kept[workspace.stream] = workspace


class Workspace:
    """Buffers by name, and launches that use them, for one stream of one device.

    Attributes:
        stream: The stream.
        checked_lists: The input of `check_rows`.
    """

    def __init__(self, launcher: Launcher, stream: Hashable = None) -> None:
        self.stream = stream
        self._launcher = launcher
        self._buffers: dict[tuple[str, str], Any] = {}
        self.checked_lists = Constants(launcher)
        self._constants: dict[str, Constants] = {}
        # Prepared launches by their kind, the latest last.
        self._sequences: OrderedDict[Hashable, Any] = OrderedDict()

    def take(self, name: str, size: int, dtype: str) -> Any:
        """Returns the first `size` elements of a buffer, with the values that they last had."""
        found = self._buffers.get((name, dtype))
        if found is None or found.size < size:
            # Those that use the smaller one would keep it.
            self._sequences.clear()
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
            self._sequences.clear()
            found = self._launcher.xp.zeros(max(1, size), dtype=dtype)
            self._buffers[name, dtype] = found
        return found

    def constants(self, name: str) -> Constants:
        """Returns numbers that stay in device memory until they change."""
        return self._constants.setdefault(name, Constants(self._launcher))

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> Launch:
        """Does what `Launcher.launch` does; returns the launch, which the next call uses again."""
        bind = partial(self._launcher.bind, kernel, num_blocks, num_threads, **arguments)
        launch = self.prepared((kernel, num_blocks), bind)
        launch.replace(**arguments)
        launch.start()
        return launch

    def prepared(self, kind: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
        """Returns launches that were prepared for this before, or prepares them."""
        found = self._sequences.get(kind)
        if found is None:
            found = prepare()
            self._sequences[kind] = found
            if len(self._sequences) > _MOST_PREPARED:
                self._sequences.popitem(last=False)
        else:
            self._sequences.move_to_end(kind)
        return found


class Constants:
    """Numbers in device memory, which are uploaded when they have changed."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._last = b""
        self._array: Any = None

    def set(self, values: Any, dtype: Any = np.int64) -> Any:
        """Returns a flat device array of these values."""
        host = np.asarray(values, dtype)
        as_bytes = host.tobytes()
        if self._array is None or as_bytes != self._last:
            if self._array is None or self._array.size != host.size:
                self._array = self._launcher.xp.empty(host.size, dtype)
            self._last = b""
            self._launcher.upload(self._array, host)
            self._last = as_bytes
        return self._array
