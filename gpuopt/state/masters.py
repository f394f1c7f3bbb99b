"""Master copies of 16-bit variables: a write to one of the two goes to the other.

A copy belongs to the state of the optimizer that keeps it. This module only compares states by
identity, because the module of states imports it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gpuopt.backends import backend_for, refuse_masked
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.interrupts import interrupts_put_off
from gpuopt.locks import Lock
from gpuopt.rules.rounded import BFLOAT16
from gpuopt.rules.split import joined, split
from gpuopt.state.slot_codecs import Masters, has_master
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.operators import checked_foreign, reading, storage_of, value_on_device
from gpuopt.variables.recording import before_write
from gpuopt.variables.row_changes import register
from gpuopt.variables.variable import Variable

Result = TypeVar("Result")

# The states of optimizers that keep master copies. Public, because each step looks whether there
# are any: a function call would cost time.
owners: dict[weakref.ref[object], None] = {}

_BITS = np.dtype(np.uint16)
_BASIC = int, np.integer, slice, type(None), type(...)
# How many elements are compared at a time: temporary arrays are never as large as a large table.
_PIECE = 1 << 22


class MasterPair:
    """A 16-bit variable and its float32 master copy, which stay equal.

    Where the variable is assigned what its master copy rounds to, or a tie rounds up to, the copy
    keeps its digits. So it does not matter which of the two is restored first. The identities of
    both hold this.

    Attributes:
        name: The variable's.
    """

    def __init__(self, state: object, variable: Variable, master: Variable) -> None:
        self._state = weakref.ref(state)
        self._variable = weakref.ref(variable.identity)
        self._master = weakref.ref(master.identity)
        self.name, self._device = variable.name, variable.device
        # Taken inside the gate.
        self._lock = Lock(f'the master copy of "{variable.name}"')

    def belongs_to(self, state: object) -> bool:
        """Whether the copy is kept by the optimizer that has this state."""
        return self._state() is state

    def is_of(self, master: Variable) -> bool:
        """Whether this is the master copy."""
        return self._master() is master.identity

    @property
    def is_alive(self) -> bool:
        """Whether variable and copy still exist."""
        return None not in (self._state(), *self._living())

    @contextmanager
    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> Iterator[None]:
        """Surrounds a write of some elements to one of the two, and then writes the other."""
        with interrupts_put_off():
            try:
                with work:
                    yield
            finally:
                self._pass_on(written, at)

    def make_equal(self, state: object) -> None:
        """Has the two be equal after a step of this state's optimizer that was not finished."""
        written = self._master() if self.belongs_to(state) else self._variable()
        if written is not None and self._device.kind == "cpu":  # a kernel of a GPU writes both
            self._pass_on(written)

    def _pass_on(self, written: Identity, at: Any = ...) -> None:
        variable, master = self._living()
        if variable is not None and master is not None:
            update = _update_variable if written is master.identity else _update_master
            arrays = variable.unread_storage, master.unread_storage
            with self._updating(arrays):
                _in_parts(update, at, arrays)

    @contextmanager
    def _updating(self, kept: Sequence[Any]) -> Iterator[None]:
        backend = backend_for(self._device)
        with self._lock, backend.enter_update(*self._identities(), kept=kept):
            yield

    def _identities(self) -> list[Identity]:
        return [each for each in (self._variable(), self._master()) if each is not None]

    def _living(self) -> tuple[Variable | None, Variable | None]:
        """Returns the variable and its master copy; None in the place of one that is gone."""
        variable, master = (
            None if identity is None else identity.holder()
            for identity in (self._variable(), self._master())
        )
        return variable, master


class SplitPair(MasterPair):
    """A bfloat16 variable and its master copy, of which 16 bits are kept beside the variable.

    Attributes:
        remainder: uint16, of the variable's shape and on its device: see `split`.
    """

    def __init__(self, state: object, variable: Variable, master: Variable) -> None:
        super().__init__(state, variable, master)
        backend = backend_for(variable.device)
        self.remainder = backend.full(variable.shape, _BITS, 0)
        # Of a variable that is gone, its copy can still be read.
        self._halves = variable.unread_storage, self.remainder
        numbers = master.unread_storage
        with self._updating([*self._halves, numbers]):
            before, self.remainder[...] = split(numbers)
            _in_parts(_split_anew, ..., self._halves, before)
            self._nothing = np.broadcast_to(backend.xp.zeros((), np.float32), master.shape)
        master._array = self._nothing
        register(self)

    def numbers(self, at: Any = ...) -> Any:
        """Returns a new array of the master copy's numbers, or of some."""
        with self._reading():
            return _as_array(joined(*[_part(each, at) for each in self._halves]))

    @contextmanager
    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> Iterator[None]:
        _, master = self._living()
        if master is None:
            with work:
                yield
            return
        is_master = written is master.identity
        # One thread at a time gives the copy an array.
        with interrupts_put_off(), self._lock if is_master else nullcontext():
            if is_master:
                before = master._array = self.numbers()
            else:
                with self._reading():
                    before = _part(self._halves[0], at).copy()
            try:
                with work:
                    yield
            finally:
                if is_master:
                    master._array = self._nothing
                    before = _part(before, at)
                self._store(_split if is_master else _split_anew, at, before)

    def is_stored(self, master: Variable) -> bool:
        """Whether the halves have the copy's numbers, and not an array that is being written."""
        return master._array is self._nothing

    @contextmanager
    def part_written(self, at: Any) -> Iterator[Any]:
        """Yields some of the master copy's numbers, in a new array, and stores them at the end."""
        part = self.numbers(at)
        with interrupts_put_off(), backend_for(self._device).enter(*self._identities()):
            yield part
            self._store(_split, at, part)

    def _store(self, update: Callable[..., None], at: Any, part: Any) -> None:
        with self._updating([*self._halves, part]):
            _in_parts(update, at, self._halves, part)

    def _reading(self) -> AbstractContextManager[Any]:
        return backend_for(self._device).enter_reading(*self._identities(), kept=self._halves)

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        if [each for each in variables if each.identity.master_pair is self]:
            raise NotImplementedError(
                f'"{self.name}" has a master copy by masters="remainder", whose rows do not come '
                'and go: use masters="float32"'
            )

    def _pass_on(self, written: Identity, at: Any = ...) -> None:
        """Does nothing: the variable is the upper half of the copy."""


class SplitMaster(Variable):
    """A master copy that is stored in two halves: it is decoded where it is read."""

    __slots__ = ()

    def _numbers(self) -> Any:
        pair = self.identity.master_pair
        if isinstance(pair, SplitPair) and pair.is_stored(self):
            return pair.numbers()
        return self._array

    def __setitem__(self, key: Any, value: Any) -> None:
        pair = self.identity.master_pair
        if not isinstance(pair, SplitPair):
            super().__setitem__(key, value)
            return
        refuse_masked(key, f'the index for "{self.name}"')
        value = checked_foreign(value, self, "the value")
        before_write((self,))
        with writing(), reading(key, value), pair.part_written(storage_of(key)) as part:
            part[...] = value_on_device(value, self, self.dtype)

    def assign_rows(self, rows: Any, value: Any) -> None:
        self[rows] = value


def refuse_split(variable: Variable) -> None:
    """Raises ValueError for a master copy in two halves, which steps cannot write."""
    pair = variable.identity.master_pair
    if isinstance(variable, SplitMaster) and isinstance(pair, SplitPair):
        raise ValueError(
            f'"{variable.name}" is the master copy of "{pair.name}" by masters="remainder", which '
            f'no step updates by itself: update "{pair.name}", by the optimizer that keeps the copy'
        )


def paired(state: object, variable: Variable, master: Variable) -> MasterPair:
    """Returns the pair of a variable and its master copy, made if there is none.

    The copy of a new pair gets the variable's value.
    """
    found = variable.identity.master_pair
    if isinstance(found, MasterPair) and found.is_of(master):
        return found
    kind = SplitPair if isinstance(master, SplitMaster) else MasterPair
    new = kind(state, variable, master)
    owners[weakref.ref(state, _forget)] = None
    variable.identity.master_pair = master.identity.master_pair = new
    new._pass_on(variable.identity)
    return new


def check_variables(state: object, variables: Sequence[Variable], masters: Masters) -> None:
    """Raises ValueError for variables that get a master copy, and would not stay in step with it.

    They are new to the optimizer that keeps the copies, whose state this is.
    """
    for variable in variables:
        if not has_master(variable.dtype):
            continue
        problem = ""
        if variable.is_raw_array or not variable.owns_memory:
            what = "is an array" if variable.is_raw_array else "was made with copy=False"
            problem = (
                f"{what}, and a write to an array is not noticed: its master copy would "
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
        elif variable.identity.master_pair is not None:
            problem = _kept_by_another(state, variable.identity.master_pair)
        if problem:
            raise ValueError(f'masters: "{variable.name}" {problem}')


def with_copies(
    state: object, identities: Sequence[Identity], write: Callable[[], Result]
) -> Callable[[], Result]:
    """Wraps `write`: afterwards, the master copies of other optimizers get the new weights."""
    if not [owner for owner in list(owners) if owner() is not state]:
        return write
    pairs = [
        (each.master_pair, each)
        for each in identities
        if isinstance(each.master_pair, MasterPair) and not each.master_pair.belongs_to(state)
    ]

    def write_and_follow() -> Result:
        with ExitStack() as stack:
            for pair, identity in pairs:
                stack.enter_context(pair.while_written(identity, nullcontext()))
            return write()

    return write_and_follow if pairs else write


def make_equal(state: object, identities: Iterable[Identity]) -> None:
    """Has variables and their copies be equal after a step of this state that was not finished."""
    for identity in identities:
        if isinstance(identity.master_pair, MasterPair):
            identity.master_pair.make_equal(state)


def _kept_by_another(state: object, pair: Any) -> str:
    if not isinstance(pair, MasterPair) or pair.belongs_to(state) or not pair.is_alive:
        return ""
    return (
        "has a master copy under another optimizer, and two would differ. Let one optimizer update "
        "it, or give masters to one of them alone"
    )


def _in_parts(update: Callable[..., None], at: Any, arrays: Sequence[Any], *parts: Any) -> None:
    """Calls `update` with the elements `at` of arrays of one shape, in pieces; it writes them.

    Arrays of these elements alone come last.
    """
    chosen = [_part(each, at) for each in arrays]
    ignore_fp_warnings(partial(_in_pieces, update, [*chosen, *parts]))
    if not _is_basic(at):
        for array, part in zip(arrays, chosen, strict=True):
            array[at] = part


def _is_basic(at: Any) -> bool:
    """Whether an index gives a view."""
    key = at if isinstance(at, tuple) else (at,)
    return all(isinstance(each, _BASIC) and not isinstance(each, bool) for each in key)


def _part(array: Any, at: Any) -> Any:
    """Returns some elements of an array: a view, or else a new array."""
    if _is_basic(at):
        key = at if isinstance(at, tuple) else (at,)
        return array[key if ... in key else (*key, ...)]
    return _as_array(array[at])


def _as_array(part: Any) -> Any:
    """Returns an array for what numpy has made a number of."""
    return np.asarray(part) if isinstance(part, np.generic) else part


def _in_pieces(update: Callable[..., None], arrays: Sequence[Any]) -> None:
    first = arrays[0]
    if first.size <= _PIECE:
        update(*arrays)
    elif len(first) == 1:
        _in_pieces(update, [each[0] for each in arrays])
    else:
        height = max(1, _PIECE * len(first) // first.size)
        for start in range(0, len(first), height):
            _in_pieces(update, [each[start : start + height] for each in arrays])


def _update_variable(variable: Any, master: Any) -> None:
    variable[...] = master.astype(variable.dtype)


def _update_master(variable: Any, master: Any) -> None:
    bits = variable.view(_BITS)
    is_same = master.astype(variable.dtype).view(_BITS) == bits
    if variable.dtype == BFLOAT16:  # a state saved with masters="remainder" rounds ties up
        is_same |= split(master)[0].view(_BITS) == bits
    master[...] = np.where(is_same, master, variable.astype(master.dtype))
    _update_variable(variable, master)


def _split(variable: Any, remainder: Any, master: Any) -> None:
    variable[...], remainder[...] = split(master)


def _split_anew(variable: Any, remainder: Any, before: Any) -> None:
    """Drops the remainders of other numbers than the variable had before."""
    bits, old = variable.view(_BITS), before.view(_BITS)
    rounded = joined(before, remainder).astype(variable.dtype)
    is_same = (bits == old) | (rounded.view(_BITS) == bits)  # others round half to even
    variable[...] = np.where(is_same, old, bits).view(variable.dtype)
    remainder[...] = np.where(is_same, remainder, 0)


def _forget(dead: weakref.ref[object]) -> None:
    owners.pop(dead, None)
