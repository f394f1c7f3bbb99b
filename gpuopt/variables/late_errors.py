"""Errors that a GPU finds after the call that caused them has returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpuopt.backends import gpu_backends
from gpuopt.device import Device
from gpuopt.locks import Lock, call_if_free
from gpuopt.variables.gate import undoing
from gpuopt.variables.registry import Registry


class LateErrors(Protocol):
    """Something whose calls may turn out to have failed."""

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises the first error that was found.

        Args:
            device: The device whose errors are wanted; by default all devices.
            wait: Whether to wait for checks that a GPU has not finished yet.
        """

    def may_take_back(self, number: object) -> bool:
        """Whether an error that is still to be found would undo the count of a variable."""


_sources: Registry[LateErrors] = Registry("the list of sources of late errors")


def register(source: LateErrors) -> None:
    """Has `raise_late_errors` ask this source, for as long as it lives."""
    _sources.add(source)


def raise_late_errors(device: Device | None = None) -> None:
    """Waits for everything enqueued on `device` to be checked, and raises the first error.

    Args:
        device: By default all devices, as before a restore: an error that is found after it would
            undo a part of what it has written.
    """
    for source in _sources.listed():
        source.raise_late(device, wait=True)


def raise_late_errors_of(number: object) -> None:
    """Does so for the calls that have counted a variable, before another value is assigned."""
    for source in _sources.listed():
        if source.may_take_back(number):
            source.raise_late(wait=True)


def check_for_late_errors(lock: Lock, check: Callable[[], None]) -> None:
    """Calls a function that reads GPUs' late errors, inside the gate and with a lock.

    A read by a signal handler in the middle of an update does not wait for another thread's step,
    which may wait for this update: the error is then raised later.

    Args:
        lock: Held by steps of the same source.
        check: May undo the count of a step.
    """
    with undoing():
        if not call_if_free(lock, check) and not is_updating():
            with lock:
                check()


def is_updating() -> bool:
    """Whether this thread is in the middle of an update, and so in a signal handler."""
    return any(lock.is_this_threads for backend in gpu_backends for lock in backend.locks)
