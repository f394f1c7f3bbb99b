"""Errors that a GPU finds after the call that caused them has returned."""

from __future__ import annotations

from typing import Protocol

from gpuopt.device import Device
from gpuopt.variables.registry import Registry


class LateErrors(Protocol):
    """Something whose calls may turn out to have failed."""

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises the first error that was found.

        Args:
            device: The device whose errors are wanted; by default all devices.
            wait: Whether to wait for checks that a GPU has not finished yet.
        """


_sources: Registry[LateErrors] = Registry("the list of sources of late errors")


def register(source: LateErrors) -> None:
    """Has `raise_late_errors` ask this source, for as long as it lives."""
    _sources.add(source)


def raise_late_errors(device: Device) -> None:
    """Waits for everything enqueued on `device` to be checked, and raises the first error."""
    for source in _sources.listed():
        source.raise_late(device, wait=True)
