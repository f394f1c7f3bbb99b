"""Page-locked host memory for copies from and to a GPU: none is used again before its copy is done.

CUDA may stop the whole device to allocate such memory, so steps allocate none: when all of it is in
use, the host waits for the oldest copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuopt.backends.cuda.launcher import Download, Event, wait_for_event

# A page: most uploads are smaller.
_SMALLEST = 4096
# How much is allocated at a time, at least, and how often for one size of blocks. Of the smallest,
# the first allocation is enough.
_SLAB_BYTES = 2**20
_MOST_SLABS = 4
_MOST_BLOCKS = 256

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Allocate = Callable[[int], Any]
NewEvent = Callable[[], Any]


class UploadBlocks:
    """Blocks that uploads are copied from.

    Args:
        device: Names the device, for errors.
        allocate: Returns page-locked memory of a size, as a buffer.
        new_event: Returns an event of the device, which counts as done.
    """

    def __init__(self, device: str, allocate: Allocate, new_event: NewEvent) -> None:
        self._device = device
        self._allocate = allocate
        self._new_event = new_event
        # By size, a power of two; the block that was used the longest time ago comes first.
        self._blocks: dict[int, deque[tuple[Bytes, Event]]] = {}
        # All of them, as those may still be read that were not put back.
        self._slabs: list[Any] = []

    def take(self, num_bytes: int) -> tuple[Bytes, Any]:
        """Takes out a block that no copy reads any more.

        Returns:
            Memory of at least `num_bytes`, and the event to record after the copy, before the block
            is put back. After an error it is not: a copy may be on its way that nothing has
            recorded.
        """
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        blocks = self._blocks.setdefault(size, deque())
        if not blocks or not blocks[0][1].done:
            slab = max(size, _SLAB_BYTES)
            if len(blocks) + slab // size <= min(_MOST_BLOCKS, _MOST_SLABS * slab // size):
                parts = np.frombuffer(self._allocate(slab), np.uint8, slab).reshape(-1, size)
                self._slabs.append(parts)
                blocks.extendleft((part, self._new_event()) for part in parts)
        block = blocks.popleft()
        try:
            wait_for_event(block[1], f"{self._device}, which reads what was uploaded")
        except BaseException:
            blocks.appendleft(block)
            raise
        return block

    def put_back(self, block: tuple[Bytes, Any]) -> None:
        """Lets later uploads have a block when the event recorded last is done."""
        self._blocks[block[0].size].append(block)


class Landing(Download):
    """A copy to the host, whose memory is used again when it is done and this object is gone.

    Attributes:
        address: Where it lands.
    """

    __slots__ = ("_free", "_memory", "address")

    def __init__(
        self,
        values: np.ndarray[Any, Any],
        event: Any,
        memory: Bytes,
        address: int,
        free: deque[tuple[Bytes, int, Event]],
    ) -> None:
        # As `Download` does it, whose call would cost time in each step.
        self.values, self.event, self.is_recorded = values, event, False
        self._memory = memory
        self.address = address
        self._free = free

    def __del__(self) -> None:
        # Memory that a copy may reach at any time is never used again. Ctrl-C may have come before
        # there was anything.
        if getattr(self, "is_recorded", False):
            self._free.append((self._memory, self.address, self.event))


class Landings:
    """Page-locked memory that small arrays are copied to; arguments are `UploadBlocks`'s."""

    SIZE = 32

    def __init__(self, device: str, allocate: Allocate, new_event: NewEvent) -> None:
        self._device = device
        self._allocate = allocate
        self._new_event = new_event
        # (memory, its address, the event at the end of its last copy)
        self._free: deque[tuple[Bytes, int, Event]] = deque()
        # Those that are taken, too: a garbage collection that finds a Landing and its event
        # together would end the event first.
        self._all: list[tuple[Bytes, int, Event]] = []

    def take(self, source: Any) -> Landing:
        """Returns where a copy of a device array, of at most SIZE bytes, can land."""
        if not self._free:
            parts = np.frombuffer(self._allocate(_SMALLEST), np.uint8, _SMALLEST)
            parts = parts.reshape(-1, self.SIZE)
            made = [(part, part.ctypes.data, self._new_event()) for part in parts]
            self._all += made
            self._free.extend(made)
        memory, address, event = self._free.popleft()
        # Its reader may have gone before the copy was done.
        if not event.done:
            wait_for_event(event, f"{self._device}, which copies flags to the host")
        values = memory[: source.nbytes].view(source.dtype)
        return Landing(values, event, memory, address, self._free)
