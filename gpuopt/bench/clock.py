"""Measures time on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import numpy as np

Step = Callable[[], object]


def time_ms(step: Step) -> float:
    """Returns how long a call takes."""
    started = perf_counter()
    step()
    return 1e3 * (perf_counter() - started)


# A kernel of one thread that runs for `nanoseconds` of the GPU's own clock.
_HOLD = """
__device__ unsigned long long now() {
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}
extern "C" __global__ void hold(unsigned long long nanoseconds) {
  const unsigned long long begin = now();
  while (now() - begin < nanoseconds) {
  }
}
"""


class Clock(Protocol):
    """Times work on the current stream.

    Attributes:
        can_be_dirty: Whether `device_ms` tells dirty caches from clean ones.
    """

    can_be_dirty: bool

    def synchronize(self) -> None:
        """Waits until the device has done all its work."""

    def device_ms(self, step: Step, host_ms: float, *, dirty: bool = False) -> float:
        """Returns the time from the beginning to the end of one step on the device.

        No data of the step is in the device's caches when the step begins. They hold other data,
        which was written and then read: the step need not write it back.

        Args:
            step: Enqueues the step's work.
            host_ms: How long the host may take to enqueue the step. The device is kept busy for
                this time.
            dirty: Leaves out the reading, so that the step finds caches full of data that must be
                written back to memory to make room.
        """

    def whole_ms(self, step: Step) -> float:
        """Returns the time of one step that waits for its end itself, on the host's clock.

        No data of the step is in the device's caches when the step begins.
        """

    def runs_ahead(self, step: Step, host_ms: float) -> bool | None:
        """Whether the host has enqueued a step before the device begins it; None if unknown."""


class HostClock:
    """A clock for arrays in host memory: there is no device to wait for.

    Args:
        flushed_bytes: How much memory is written before a step that is timed with empty caches.
    """

    can_be_dirty = False

    def __init__(self, flushed_bytes: int = 0) -> None:
        self._larger_than_caches = np.zeros(flushed_bytes, np.uint8)

    def synchronize(self) -> None:
        pass

    def device_ms(self, step: Step, host_ms: float, *, dirty: bool = False) -> float:
        return self.whole_ms(step)

    def whole_ms(self, step: Step) -> float:
        self._larger_than_caches += 1
        return time_ms(step)

    def runs_ahead(self, step: Step, host_ms: float) -> bool | None:
        return None


class GpuClock:
    """A clock for the current GPU, through CuPy, which is given."""

    can_be_dirty = True

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._device = cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(self._device.id)
        l2_bytes = int(properties["l2CacheSize"])
        self._larger_than_caches = cupy.empty(l2_bytes, dtype=np.uint32)  # four times as many bytes
        self._read = cupy.empty((), dtype=np.uint32)
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._hold = cupy.RawKernel(_HOLD, "hold")

    def synchronize(self) -> None:
        self._device.synchronize()

    def hold(self, milliseconds: float) -> None:
        """Keeps the current stream busy; returns at once."""
        self._hold((1,), (1,), (np.uint64(1e6 * milliseconds),))

    def device_ms(self, step: Step, host_ms: float, *, dirty: bool = False) -> float:
        self.synchronize()
        self._flush_caches(dirty)
        self.hold(host_ms)
        self._begin.record()
        step()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._begin, self._end))

    def whole_ms(self, step: Step) -> float:
        self._flush_caches(dirty=False)
        self.synchronize()
        return time_ms(step)

    def runs_ahead(self, step: Step, host_ms: float) -> bool | None:
        self.synchronize()
        self.hold(50 + 4 * host_ms)
        self._begin.record()
        step()
        is_ahead = not self._begin.done
        self.synchronize()
        return is_ahead

    def _flush_caches(self, dirty: bool) -> None:
        """Fills the caches with other data; clean lines make room without a write to memory."""
        self._larger_than_caches.fill(0)
        if not dirty:
            self._larger_than_caches.max(out=self._read)


def make_gpu_copy(cupy: Any, num_bytes: int) -> Step:
    """Makes a copy within the GPU's memory, on the current stream."""
    source = cupy.ones(num_bytes // 4, dtype=np.float32)
    target = cupy.empty_like(source)
    stream = cupy.cuda.get_current_stream()
    return lambda: target.data.copy_from_device_async(source.data, num_bytes, stream)
