"""Calls of user code inside a step: it may make steps, a signal handler may not."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from gpuopt.variables.behind import own_numbers
from gpuopt.variables.gate import is_writing, refuse_between_writes
from gpuopt.variables.unfinished import BegunStep, begun

Result = TypeVar("Result")


def refuse_in_a_step() -> None:
    """Raises RuntimeError if this thread is in the middle of a step, a save or a restore.

    But not in user code that the step calls.
    """
    refuse_between_writes()
    step = _innermost_step()
    if step is not None and not step.admits_steps:
        raise RuntimeError(
            f'a step cannot begin in the middle of a step of "{step.unfinished_name}", as by a '
            "signal handler: let the handler set a flag, and make the step after apply_gradients"
        )


def call_user_code(
    function: Callable[..., Result], *arguments: Any, is_ours: bool = False
) -> Result:
    """Calls a function that may make steps, as a hook, in the middle of a step.

    Args:
        function: See above.
        *arguments: Its arguments.
        is_ours: Whether it is none of the user's, called by a hook.
    """
    step = _innermost_step()
    if step is None:
        return function(*arguments)
    before, ledger, numbers = step.calls_user_code, own_numbers.ledger, own_numbers.of
    try:
        step.calls_user_code = not is_ours
        own_numbers.ledger, own_numbers.of = None, {}
        return function(*arguments)
    finally:
        step.calls_user_code = before
        own_numbers.ledger, own_numbers.of = ledger, numbers


def _innermost_step() -> BegunStep | None:
    """Returns the step of this thread that began last of those that are being made."""
    thread = get_ident()
    steps = [step for step, touched in begun.copy().items() if touched is None]
    mine = [step for step in steps if step.thread == thread]
    return mine[-1] if mine and is_writing(thread) else None
