"""All or none of several writes.

What could fail or be interrupted comes first: its earlier values are kept, and put back on error.
Plain copies in host memory come last, by built-ins alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.interrupts import at_once, interrupts_put_off
from gpuopt.variables.identity import Identity
from gpuopt.variables.recording import before_write
from gpuopt.variables.unfinished import settle
from gpuopt.variables.variable import Variable

Array = np.ndarray[Any, Any]


def all_or_nothing(write: Callable[[Undo], object]) -> None:
    """Calls `write`, and undoes its noted writes if it raises; to be called inside the gate.

    Ctrl-C waits until everything is written; a second one undoes the writes so far.
    """
    with interrupts_put_off():
        undo = Undo()
        try:
            write(undo)
            undo.finish()
        except BaseException as error:
            if not undo.is_finished:
                undo.put_back(error)
            raise
        finally:
            if undo.is_finished:
                settle(undo.written())


class Undo:
    """What some writes have replaced.

    Replaced values are kept in host memory: in copies, or in memory that `give` has lent.

    Attributes:
        is_finished: Whether everything is written, and stays.
    """

    def __init__(self) -> None:
        self.is_finished = False
        self._assigned: list[Variable] = []
        # Variables in host memory, and what is copied to them at the end. No tuples: of many, they
        # would set off Python's garbage collector again and again.
        self._waiting: list[Variable] = []
        self._values: list[Array] = []
        # What is written, and what undoes the write: noted before it, and called again if it was
        # interrupted.
        self._entries: list[tuple[Any, Callable[[], object]]] = []
        self._given: dict[int, Array] = {}

    def give(self, values: Iterable[Array]) -> None:
        """Lends the memory of values that nobody reads any more once `assign` has written them.

        Values that are listed twice, as for two variables, keep theirs.
        """
        values = list(values)
        uses = Counter(map(id, values))
        self._given.update({id(each): each for each in values if uses[id(each)] == 1})

    def assign(self, variable: Variable, value: Array) -> None:
        """Overwrites a variable's value in place, in `finish` at last; see `Variable.assign`.

        Args:
            variable: What is written.
            value: Not to be changed before `finish`.
        """
        if _is_plain_copy(variable, value):
            before_write([variable])
            self._values.append(value)
            self._waiting.append(variable)
            return
        kept = self.keep(variable)
        variable.overwrite(value)  # other writes may fail, and undo it
        lent = self._given.pop(id(value), None)
        if lent is not None and lent.flags.writeable and lent.dtype == kept.values.dtype:
            lent[...] = kept.values
            kept.values = lent

    def keep(self, variable: Variable) -> _Values:
        """Keeps a variable's value, which is about to be overwritten."""
        kept = _Values(variable)
        self._assigned.append(variable)
        self._entries.append((variable, kept.put_back))
        return kept

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an object's attribute."""
        before = getattr(owner, name)
        self._entries.append((name, lambda: setattr(owner, name, before)))
        setattr(owner, name, value)

    def replace_items(self, mapping: MutableMapping[Any, Any], items: Any) -> None:
        """Replaces all that a mapping holds."""
        before = dict(mapping)
        self._entries.append(("a dictionary", lambda: _replace_items(mapping, before)))
        _replace_items(mapping, items)

    def on_error(self, what: str, put_back: Callable[[], object]) -> None:
        """Has `put_back` undo the writes to `what` that follow; called again if interrupted."""
        self._entries.append((what, put_back))

    def finish(self) -> None:
        """Makes the writes that wait; from then on nothing is undone."""
        arrays = [each._array for each in self._waiting]
        copy: partial[Any] = partial(
            deque, map(setitem, arrays, repeat(...), self._values), maxlen=0
        )
        at_once([copy, partial(setattr, self, "is_finished", True)])  # none of which can fail

    def written(self) -> list[Identity]:
        """Lists the identities of the variables that were overwritten."""
        return [variable.identity for variable in (*self._assigned, *self._waiting)]

    def put_back(self, error: BaseException) -> None:
        """Undoes everything, the last first; Ctrl-C does not end it.

        Args:
            error: The reason. What cannot be put back, as on a GPU that has failed, is added as a
                note.
        """
        failed: list[str] = []
        while self._entries:
            try:
                self._put_all_back(failed)
            except KeyboardInterrupt:
                continue
        if failed:
            error.add_note(
                f"What was there before could not be put back to {', '.join(failed)}: restore them."
            )

    def _put_all_back(self, failed: list[str]) -> None:
        while self._entries:
            what, put_back = self._entries[-1]
            try:
                put_back()
            except Exception as error:
                name = f'"{what.name}"' if isinstance(what, Variable) else what
                failed.append(f"{name} ({type(error).__name__}: {error})")
            self._entries.pop()


class _Values:
    """A variable's values of before.

    Attributes:
        values: In host memory.
    """

    def __init__(self, variable: Variable) -> None:
        self._variable = variable
        backend = backend_for(variable.memory)
        with backend.enter(variable.identity):
            variable.bring_up()
            # Also after `refuse_reads`: these values are for no reader.
            self.values: Array = backend.to_host(variable._numbers(), even_if_refused=True)

    def put_back(self) -> None:
        variable = self._variable
        with variable._writing():
            backend_for(variable.memory).overwrite(variable._array, self.values)


def _is_plain_copy(variable: Variable, value: Array) -> bool:
    """Whether an assignment just copies bytes in host memory, which cannot fail."""
    array = variable._array
    return (
        variable.memory.kind == "cpu"
        and variable.identity.behind is None
        and variable.identity.master_pair is None
        and type(value) is np.ndarray
        and (value.shape, value.dtype) == (array.shape, array.dtype)
        and array.flags.writeable
        and not np.may_share_memory(array, value)
    )


def _replace_items(mapping: MutableMapping[Any, Any], items: Any) -> None:
    mapping.clear()
    mapping.update(items)
