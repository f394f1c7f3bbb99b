"""Errors that a GPU finds after the call that caused them has returned."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from gpuopt.device import Device
from gpuopt.locks import Lock


class LateErrors(Protocol):
    """Something whose calls may turn out to have failed."""

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises the first error that was found.

        Args:
            device: The device whose errors are wanted; by default all devices.
            wait: Whether to wait for checks that a GPU has not finished yet.
        """


_sources: WeakSet[LateErrors] = WeakSet()
# Threads make optimizers, which are sources, while others ask. Reentrant, for garbage collections.
_guard = Lock("the list of sources of late errors")


def register(source: LateErrors) -> None:
    """Has `raise_late_errors` ask this source, for as long as it lives."""
    with _guard:
        _sources.add(source)


def raise_late_errors(device: Device) -> None:
    """Waits for everything enqueued on `device` to be checked, and raises the first error."""
    with _guard:
        sources = list(_sources)
    for source in sources:
        source.raise_late(device, wait=True)
