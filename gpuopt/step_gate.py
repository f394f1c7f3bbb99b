"""Keeps whoever saves or restores state out of the middle of a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _ThisThread(threading.local):
    in_step = False
    between_steps = False


_this_thread = _ThisThread()
_changed = threading.Condition()
_running_steps = 0
_waiting_or_between = 0
_is_between = False


@contextmanager
def step() -> Iterator[None]:
    """Writes variables, slots and the step's count, beside other threads' steps.

    A step inside a step, as of an optimizer that wraps another, belongs to the outer one.
    """
    global _running_steps
    if _this_thread.in_step or _this_thread.between_steps:
        yield
        return
    with _changed:
        # Who wants to save goes first, or threads that never pause would keep it waiting forever.
        _changed.wait_for(lambda: _waiting_or_between == 0)
        _running_steps += 1
    _this_thread.in_step = True
    try:
        yield
    finally:
        _this_thread.in_step = False
        with _changed:
            _running_steps -= 1
            if _waiting_or_between:
                _changed.notify_all()


@contextmanager
def between_steps() -> Iterator[None]:
    """Waits until no thread is in the middle of a step, and holds the next steps back.

    Raises:
        RuntimeError: this thread itself is in the middle of one.
    """
    global _waiting_or_between, _is_between
    if _this_thread.in_step:
        raise RuntimeError(
            "state cannot be saved or restored in the middle of a step, as from a hook of the "
            "optimizer: half of it is the old step's; do it after apply_gradients"
        )
    if _this_thread.between_steps:
        yield
        return
    with _changed:
        _waiting_or_between += 1
        try:
            _changed.wait_for(lambda: _running_steps == 0 and not _is_between)
        except BaseException:  # an interrupt from the keyboard must not hold steps back forever
            _waiting_or_between -= 1
            _changed.notify_all()
            raise
        _is_between = True
    _this_thread.between_steps = True
    try:
        yield
    finally:
        _this_thread.between_steps = False
        with _changed:
            _is_between = False
            _waiting_or_between -= 1
            _changed.notify_all()
