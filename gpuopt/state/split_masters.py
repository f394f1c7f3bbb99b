"""Master copies of bfloat16 variables of which the variable is the upper half."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.quietly import quietly
from gpuopt.rules.split import joined, split
from gpuopt.state.masters import MasterPair, pair
from gpuopt.variables.behind import RowsBehind
from gpuopt.variables.gate import undoing
from gpuopt.variables.identity import Identity
from gpuopt.variables.row_changes import register
from gpuopt.variables.variable import Variable

if TYPE_CHECKING:
    from gpuopt.state.state import State


class SplitPair(MasterPair):
    """A bfloat16 variable and its master copy, of which 16 bits are kept beside the variable.

    The copy's slot has an array while somebody looks at it: from its making, or from a read, to the
    next step.

    Attributes:
        remainder: uint16, of the variable's shape and on its device.
    """

    def __init__(self, state: State, variable: Variable, master: Variable) -> None:
        super().__init__(state, variable, master)
        backend = backend_for(variable.device)
        self.remainder = backend.full(variable.shape, np.dtype(np.uint16), 0)
        self._is_shown = True  # it has just been made
        self._name = variable.name
        register(self)

    def behind_of_master(self) -> RowsBehind:
        return _Shown(self)

    def note_written(self, written: Identity) -> None:
        self.show()
        super().note_written(written)

    def note_unfinished(self) -> None:
        """Does nothing: a step writes the variable, which has the copy's upper half."""

    def _make_equal(self) -> None:
        super()._make_equal()
        with undoing(), self._lock:
            _, master = self._living()
            if self._is_written is not None:  # by another thread, which needs the array
                return
            # Before: who looks after Ctrl-C would be shown the array without memory.
            self._is_shown = False
            if master is not None:
                backend = backend_for(master.device)
                with backend.enter_update(master.identity, kept=(master.unread_storage,)):
                    # Of the same shape, and without memory.
                    nothing = np.broadcast_to(backend.xp.zeros((), np.float32), master.shape)
                    master._array = nothing

    def _is_equal(self) -> bool:
        return super()._is_equal() and not self._is_shown

    def show(self) -> None:
        """Gives the copy's slot an array with its numbers."""
        if self._is_shown:
            return
        with undoing(), self._lock:
            variable, master = self._living()
            if not self._is_shown and variable is not None and master is not None:
                backend = backend_for(variable.device)
                kept = variable.unread_storage, self.remainder
                shown = backend.empty(variable.shape, np.dtype(np.float32))
                with (
                    backend.enter_reading(variable.identity, kept=kept),
                    backend.enter_update(master.identity, kept=(shown,)),
                ):
                    shown[...] = joined(*kept)
                master._array = shown
                self._is_shown = True
                self._list_as_unequal()

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        if [each for each in variables if each.identity.behind is self]:
            raise NotImplementedError(
                f'"{self._name}" has a master copy by masters="remainder", whose rows do not come '
                'and go: use masters="float32"'
            )

    def _agree(self, written: Identity, variable: Variable, master: Variable) -> None:
        backend = backend_for(variable.device)
        arrays = variable.unread_storage, self.remainder, master.unread_storage
        with backend.enter_update(variable.identity, master.identity, kept=arrays):
            quietly(partial(_split_anew, *arrays, is_master_newer=written is master.identity))


class _Shown:
    """What a master copy's identity holds: it is shown to who reads or writes it."""

    holds_arrays = False

    def __init__(self, pair: SplitPair) -> None:
        self._pair = pair

    def bring_up(self, rows: Any = None) -> None:
        self._pair.bring_up()
        self._pair.show()

    @contextmanager
    def while_written(self, written: Any, work: AbstractContextManager[Any]) -> Iterator[None]:
        with self._pair.while_written(written, work):
            yield


def paired(state: State, variable: Variable, master: Variable) -> MasterPair:
    """Returns the pair of a variable and its copy, of the kind that an optimizer's state keeps."""
    kind = SplitPair if state.describe().slot_codecs.masters == "remainder" else MasterPair
    return pair(state, variable, master, kind)


def _split_anew(variable: Any, remainder: Any, master: Any, *, is_master_newer: bool) -> None:
    """Splits a master copy anew; where the variable is newer and is another number, it stays."""
    weights, rest = split(master)
    if not is_master_newer:
        bits = np.dtype(np.uint16)
        mine = variable.view(bits)
        # Others round half to even.
        is_same = (weights.view(bits) == mine) | (master.astype(variable.dtype).view(bits) == mine)
        weights = np.where(is_same, weights.view(bits), mine).view(variable.dtype)
        rest = np.where(is_same, rest, 0)
        master[...] = np.where(is_same, master, variable.astype(master.dtype))
    variable[...], remainder[...] = weights, rest
