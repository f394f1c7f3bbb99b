"""Steps that were cut while they wrote, remembered until they are settled.

A step is in `begun` from before it reads its scalars until it is counted. A step that is still
there when its thread makes it no longer was not finished: an exception, as of Ctrl-C, has ended it.
The variables, slots, powers and counts that it may have touched may then differ in their steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakSet

from gpuopt.variables.gate import is_writing
from gpuopt.variables.identity import Identity


class Touched:
    """What a step writes, by identity; none of it is kept alive.

    Attributes:
        arrays: Variables, slots and averages.
        numbers: Counts and powers, each of which is whole at any moment.
    """

    def __init__(self, arrays: Sequence[Identity], numbers: Sequence[Identity]) -> None:
        self.arrays = WeakSet(arrays)
        self.numbers = WeakSet(numbers)


class BegunStep(Protocol):
    """A step that is being made.

    Attributes:
        thread: The identifier of its thread.
        calls_user_code: Whether it calls a hook or a constraint: see `call_user_code`.
        admits_steps: Whether user code that it calls may make steps in this thread now.
        unfinished_name: Of its optimizer.
        unfinished_state: The state of its optimizer; None if that is gone.
    """

    thread: int
    calls_user_code: bool

    @property
    def admits_steps(self) -> bool: ...

    @property
    def unfinished_name(self) -> str: ...

    @property
    def unfinished_state(self) -> Any: ...

    def touched(self) -> Touched | None:
        """Returns what it may have written, the same once it is known; None if that is nothing."""

    def let_go(self) -> None:
        """Keeps nothing alive any more that others may drop; called once what it touched is known.

        Called again if it was interrupted.
        """

    def accept(self) -> None:
        """Counts the step as if it had been made."""


# The steps; None until it is known that one was not finished. Public, because each step looks
# whether there are any, and adds itself: function calls would cost time.
begun: dict[BegunStep, Touched | None] = {}


def note_unfinished(step: BegunStep) -> None:
    """Remembers that a step in `begun` was not finished.

    If this is interrupted, the step stays in `begun` as it is, and `note_all` notes it.
    """
    touched = step.touched()
    if touched is None:
        begun.pop(step, None)
    elif step in begun:
        step.let_go()
        begun[step] = touched


def note_all() -> None:
    """Notes the steps whose noting was interrupted; forgets those whose arrays are all gone."""
    for step, touched in begun.copy().items():
        # Its exception was noted, or that, too, was interrupted.
        if touched is None and not is_writing(step.thread):
            note_unfinished(step)
        elif touched is not None and not touched.arrays:  # they are gone
            begun.pop(step, None)


def unfinished_steps() -> list[tuple[BegunStep, Touched]]:
    """Lists the steps that were not finished, and are not settled."""
    note_all()
    return [(step, touched) for step, touched in begun.copy().items() if touched is not None]


def refuse_unfinished(what: str, identities: Sequence[Identity], state: Any = None) -> None:
    """Raises RuntimeError if a step was not finished that may have touched one of these.

    Args:
        what: Cannot be done, as "saved".
        identities: Those that are to be saved or stepped.
        state: Of an optimizer whose own unfinished steps count in any case.
    """
    for step, touched in unfinished_steps() if begun else ():
        found = [each for each in identities if each in touched.arrays or each in touched.numbers]
        if not found and state is not None and step.unfinished_state is state:
            found = list(touched.arrays)
        if found:
            if step.unfinished_state is None:
                whose = "an optimizer that is gone"
                names = ", ".join(sorted(f'"{each.name}"' for each in touched.arrays))
                hint = f"restore or assign what it may have written: {names}"
            else:
                whose = f'"{step.unfinished_name}"'
                hint = (
                    "restore or load it with its slots, or keep the values as they are by "
                    "accept_unfinished_step() of that optimizer"
                )
            raise RuntimeError(
                f'"{found[0].name}" cannot be {what}: a step of {whose} had begun to write it and '
                f"was not finished; {hint}"
            )


def settle(written: Sequence[Identity]) -> None:
    """Notes that variables, slots and averages were written in full, by a restore or the like.

    A step is settled once this is so of all that it may have touched.
    """
    for step, touched in unfinished_steps() if begun else ():
        touched.arrays.difference_update(written)
        if not touched.arrays:
            begun.pop(step, None)


def accept_steps_of(state: Any) -> None:
    """Counts the unfinished steps of an optimizer as if they had been made; values stay."""
    for step, _ in unfinished_steps():
        if step.unfinished_state is state:
            step.accept()
            begun.pop(step, None)


def _forget_other_threads() -> None:
    """A forked child has the steps of its parent's other threads as they are."""
    for step, touched in begun.copy().items():
        if touched is None and step.thread != get_ident():
            del begun[step]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
