"""Float32 master copies of 16-bit variables, each kept in step with its variable."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.locks import Lock
from gpuopt.quietly import quietly
from gpuopt.state.slot_codecs import MASTER, Masters, has_master
from gpuopt.variables.behind import RowsBehind
from gpuopt.variables.gate import undoing
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

if TYPE_CHECKING:
    from gpuopt.state.state import State

# Pairs that a step of their optimizer has to settle, as one of the two was written. Other threads
# add some at any time: a dictionary is listed at once, which a WeakSet is not.
_unequal: dict[weakref.ref[MasterPair], None] = {}
# The states of optimizers that keep master copies. Public, because each step looks whether there
# are any: a function call would cost time.
owners: dict[weakref.ref[State], None] = {}


class MasterPair:
    """A 16-bit variable and its master copy: what was written last counts; a `RowsBehind`.

    Where the variable is assigned what its master copy rounds to, the copy keeps its digits. So it
    does not matter which of the two is restored first. The identities of both hold this.
    """

    holds_arrays = False

    def __init__(self, state: State, variable: Variable, master: Variable) -> None:
        self._state = weakref.ref(state)
        self._variable = weakref.ref(variable.identity)
        self._master = weakref.ref(master.identity)
        self._is_written: Identity | None = None
        self._num_writes = 0
        self._lock = Lock(f'the master copy of "{variable.name}"')

    def belongs_to(self, state: State) -> bool:
        """Whether the copy is kept by the optimizer that has this state."""
        return self._state() is state

    def is_of(self, master: Variable) -> bool:
        """Whether this is the master copy."""
        return self._master() is master.identity

    def behind_of_master(self) -> RowsBehind:
        """Returns what the identity of the copy holds."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether variable and copy still exist."""
        return None not in (self._state(), *self._living())

    def note_written(self, written: Identity) -> None:
        """Notes that the variable or the copy is being written, or was."""
        self._is_written = written
        self._num_writes += 1
        self._list_as_unequal()

    def note_unfinished(self) -> None:
        """Notes that a step of the copy has failed before the variable followed, or after that."""
        master = self._master()
        if master is not None:
            self.note_written(master)

    @contextmanager
    def while_written(self, written: Any, work: AbstractContextManager[Any]) -> Iterator[None]:
        self.note_written(written)
        try:
            with work:
                yield
        finally:  # again: a reader may have come between
            self.note_written(written)

    def bring_up(self, rows: Any = None) -> None:
        if self._is_written is None:
            return
        with undoing(), self._lock:
            variable, master = self._living()
            num_writes, written = self._num_writes, self._is_written
            if written is not None and variable is not None and master is not None:
                self._agree(written, variable, master)
            if self._num_writes == num_writes:  # else another thread has written meanwhile
                self._is_written = None

    def settle(self) -> None:
        """Has variable and copy agree before a step."""
        self._make_equal()
        # Last: what Ctrl-C ends before this is for the next step.
        _unequal.pop(weakref.ref(self), None)
        if not self._is_equal():  # written by another thread meanwhile
            self._list_as_unequal()

    def _make_equal(self) -> None:
        self.bring_up()

    def _is_equal(self) -> bool:
        return self._is_written is None

    def _list_as_unequal(self) -> None:
        _unequal[weakref.ref(self, _forget_pair)] = None

    def _agree(self, written: Identity, variable: Variable, master: Variable) -> None:
        is_master = written is master.identity
        source, target = (master, variable) if is_master else (variable, master)
        arrays = source.unread_storage, target.unread_storage
        backend = backend_for(variable.device)
        with (
            backend.enter_reading(source.identity, kept=arrays),
            backend.enter_update(target.identity, kept=arrays),
        ):
            quietly(partial(_round if is_master else _follow, *arrays, backend.xp))

    def _living(self) -> tuple[Variable | None, Variable | None]:
        """Returns the variable and its master copy; None in the place of one that is gone."""
        variable, master = (
            None if identity is None else identity.holder()
            for identity in (self._variable(), self._master())
        )
        return variable, master


def pair(
    state: State,
    variable: Variable,
    master: Variable,
    make: Callable[[State, Variable, Variable], MasterPair],
) -> MasterPair:
    """Returns the pair of a variable and its master copy, made if there is none.

    Of a new one, the variable counts.
    """
    found = variable.identity.behind
    if isinstance(found, MasterPair) and found.is_of(master):
        return found
    new = make(state, variable, master)
    new.note_written(variable.identity)
    owners[weakref.ref(state, _forget)] = None
    variable.identity.behind, master.identity.behind = new, new.behind_of_master()
    return new


def create_master(state: State, variable: Variable) -> None:
    """Makes the master copy that a variable lacks, or takes the one that waits for it."""
    if state.slot(variable, MASTER) is None:
        op_name = state.describe().op_name(MASTER)
        float32 = np.dtype(np.float32)
        state.create_slot(variable, MASTER, op_name, variable.storage, variable.shape, float32)


def master_or_own(state: State, variable: Variable) -> Variable:
    """Returns a variable's master copy; the variable itself where there is none."""
    master = state.slot(variable, MASTER)
    return variable if master is None else master


def check_variables(state: State, variables: Sequence[Variable], masters: Masters) -> None:
    """Raises ValueError for variables that get a master copy, and would not stay in step with it.

    Args:
        state: Of the optimizer that keeps the copies.
        variables: Those that are new to it.
        masters: What it keeps.
    """
    for variable in variables:
        if not has_master(variable.dtype):
            continue
        problem = ""
        if variable.is_raw_array or not variable.owns_memory:
            what = "is an array" if variable.is_raw_array else "was made with copy=False"
            problem = (
                f"{what}, and nobody notices what is written to an array: its master copy would "
                "not follow. Make a variable of a copy, gpuopt.Variable(array)"
            )
        elif masters == "remainder" and variable.dtype == np.float16:
            problem = (
                "is float16, and only bfloat16 variables are the upper half of their copy: use "
                'masters="float32"'
            )
        elif variable.constraint is not None:
            problem = (
                "has a constraint, which would project the variable and leave its master copy with "
                "16 bits after each step. Leave one of them out"
            )
        elif variable.identity.behind is not None:
            problem = _kept_by_another(state, variable.identity.behind)
        if problem:
            raise ValueError(f'masters: "{variable.name}" {problem}')


def settle(state: State, identities: Sequence[Identity]) -> None:
    """Has pairs agree before a step, which writes a variable and its copy, or the variable alone.

    Args:
        state: Of the step's optimizer.
        identities: Those of the variables that the step writes.
    """
    for each in list(_unequal):
        found = each()
        # Not those of others: another thread may be writing one of them.
        if found is not None and found.belongs_to(state):
            found.settle()
    if [owner for owner in list(owners) if owner() is not state]:
        for identity in identities:
            behind = identity.behind
            if isinstance(behind, MasterPair) and not behind.belongs_to(state):
                behind.bring_up()
                behind.note_written(identity)


def note_unfinished(state: State, identities: Sequence[Identity]) -> None:
    """Has variables follow their copies after a step that may have written the copies alone.

    Args:
        state: Of the step's optimizer.
        identities: Those of the variables that the step writes.
    """
    for identity in identities:
        found = identity.behind
        if isinstance(found, MasterPair) and found.belongs_to(state):
            found.note_unfinished()


def _kept_by_another(state: State, behind: Any) -> str:
    if not isinstance(behind, MasterPair):
        return "has rows that catch up under another optimizer: they have no master copy"
    if behind.belongs_to(state) or not behind.is_alive:
        return ""
    return (
        "has a master copy under another optimizer, and two would differ. Let one optimizer update "
        "it, or give masters to one of them alone"
    )


def _round(master: Any, variable: Any, xp: Any) -> None:
    variable[...] = master.astype(variable.dtype)


def _follow(variable: Any, master: Any, xp: Any) -> None:
    bits = np.dtype(np.uint16)
    rounded = master.astype(variable.dtype)
    is_same = rounded.view(bits) == variable.view(bits)
    master[...] = xp.where(is_same, master, variable.astype(master.dtype))


def _forget(dead: weakref.ref[State]) -> None:
    owners.pop(dead, None)


def _forget_pair(dead: weakref.ref[MasterPair]) -> None:
    _unequal.pop(dead, None)
