"""The counts of steps that each variable has of its own.

Variables that all steps have updated together share one count, which the host keeps; a step that
updates some of them alone gives these a count of their own. So a step counts a few numbers, however
many variables it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import Range, State
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

# The slot's name.
STEP = "step"

# What optimizers that count nothing else start with.
STEP_OF_EACH: Mapping[str, np.generic] = MappingProxyType({STEP: np.int64(0)})
# As far as float64 counts.
RANGE_OF_STEP = Range(0.0, 2.0**53, np.int64)

_numbers = count(1)


class StepCount(HostScalar):
    """The number of steps of some variables: the slot `step` of each of them.

    Attributes:
        number: No other count has it.
        group: The number of the parameter group that the variables are in.
        members: The variables' identities.
        beside: The other slots that change with it, by name.
    """

    __slots__ = ("beside", "group", "members", "number")

    def __init__(self, value: np.generic, group: int, beside: Mapping[str, HostScalar], at: Any):
        super().__init__(value, STEP, at)
        self.identity.was_named_by_gpuopt()
        self.number = next(_numbers)
        self.group = group
        self.beside = beside
        self.members: WeakSet[Identity] = WeakSet()

    def all(self) -> dict[str, HostScalar]:
        """Returns it and what is beside it, by the names of slots."""
        return {STEP: self, **self.beside}


class Grouping(Protocol):
    """The part of an optimizer's groups that counts use."""

    def number_of(self, variable: Variable) -> int:
        """Returns the number of a variable's parameter group."""


class CountingOptimizer(Protocol):
    """The part of an optimizer that counts the steps of each variable."""

    own_counts: Mapping[str, np.generic]
    state: State

    @property
    def _grouping(self) -> Grouping: ...

    def _counts_of_all(
        self, numbers: Mapping[str, Any], name: str, variable: Variable | None
    ) -> Mapping[str, Any]:
        """Returns a variable's counts in a state with one count for all; see `Optimizer`."""


class CountSlot:
    """A variable's count of steps, or what is beside it, as `get_slot` returns it.

    Attributes:
        name: The slot's name.
    """

    shape = ()

    def __init__(self, optimizer: Any, variable: Variable, name: str) -> None:
        self.name = name
        self._optimizer = optimizer
        self._variable = variable

    @property
    def _number(self) -> HostScalar:
        slot = self._optimizer.state.slot(self._variable, self.name)
        assert isinstance(slot, HostScalar)
        return slot

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._number.dtype

    @property
    def device(self) -> Any:
        return self._variable.device

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns a copy."""
        return self._number.numpy()

    def assign(self, value: Any) -> CountSlot:
        """Changes the count of this variable alone.

        Raises:
            ValueError: it is no single number, or a `step` that is no whole number from 0.
        """
        optimizer, given = self._optimizer, np.asarray(to_device(value, Device.cpu))
        is_count = given.dtype.kind in "iuf" and given.size == 1
        if is_count and self.name == STEP:
            is_count = given.item() >= 0 and given.item() % 1 == 0
        if not is_count:
            raise ValueError(f'{self.name} of "{self._variable.name}" cannot be {value!r}')
        optimizer.ledger.settle()
        state, names = optimizer.state, list(optimizer.own_counts)
        with writing(), state.lock:
            counts = {name: state.slot(self._variable, name).numpy() for name in names}
            counts[self.name] = given.reshape(())
            assign_counts(state, {self._variable: counts}, optimizer)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        return f'<CountSlot "{self.name}" of "{self._variable.name}": {self.numpy()}>'


def counts_of(state: State, variables: Iterable[Variable]) -> Sequence[StepCount]:
    """Returns the counts of some variables, each once."""
    slots = (state.slot(variable, STEP) for variable in variables)
    return list(dict.fromkeys(slot for slot in slots if isinstance(slot, StepCount)))


def numbers_of(counts: Iterable[StepCount]) -> list[HostScalar]:
    """Returns all numbers that steps of some counts change."""
    return [number for each in counts for number in each.all().values()]


def create_counts(
    state: State, variables: Sequence[Variable], optimizer: CountingOptimizer
) -> None:
    """Makes the counts that variables lack: from their starts, or from restored values.

    Raises:
        ValueError: a waiting value does not fit, or the restored slots went to another optimizer.
    """
    new = [each for each in variables if state.slot(each, STEP) is None]
    if not new:
        return
    starts = optimizer.own_counts
    with writing(), state.lock:
        restored = {
            each: {
                name: state.restored_slot(each, name, (), np.dtype(type(start)))
                for name, start in starts.items()
            }
            for each in new
        }
        given = {
            each: {name: starts[name] if value is None else value for name, value in found.items()}
            for each, found in restored.items()
        }
        for variable, number, name in _shared_by_equal(given, optimizer):
            state.add_slot(variable, name, number, restored[variable][name])


def assign_counts(
    state: State,
    given: Mapping[Variable, Mapping[str, Any]],
    optimizer: CountingOptimizer,
) -> None:
    """Gives variables other counts than they have, by the names of slots.

    Those with equal ones share them from then on.
    """
    with writing(), state.lock:
        for variable, number, name in _shared_by_equal(given, optimizer):
            old = state.slot(variable, name)
            state.table(name)[variable.identity] = number
            if isinstance(old, StepCount):
                old.members.discard(variable.identity)


def shared_with_others(
    state: State, variables: Iterable[Variable]
) -> dict[StepCount, list[Identity]]:
    """Returns the counts that some variables share with others, and the variables' identities."""
    found: dict[StepCount, list[Identity]] = {}
    for variable in variables:
        slot = state.slot(variable, STEP)
        if isinstance(slot, StepCount):
            found.setdefault(slot, []).append(variable.identity)
    return {each: mine for each, mine in found.items() if len(mine) < len(each.members)}


def separate_counts(
    state: State, variables: Iterable[Variable], settle: Callable[[], None]
) -> None:
    """Gives the variables of a step counts apart from those of all others.

    Before a count is replaced, `settle` waits for what GPUs may still refuse or skip: that would be
    undone in the old one.
    """
    if not shared_with_others(state, variables):
        return
    settle()
    with writing(), state.lock:
        for old, mine in shared_with_others(state, variables).items():
            beside = {name: _copy(number) for name, number in old.beside.items()}
            new = StepCount(old.scalar(), old.group, beside, old.device)
            new.members.update(mine)
            for name, number in new.all().items():
                for identity in mine:
                    state.table(name)[identity] = number
            old.members.difference_update(mine)


def _copy(number: HostScalar) -> HostScalar:
    return _new_number(number.scalar(), number.identity.name, number.device)


def _new_number(value: np.generic, name: str, device: Any) -> HostScalar:
    number = HostScalar(value, name, device)
    number.identity.was_named_by_gpuopt()
    return number


def _shared_by_equal(
    given: Mapping[Variable, Mapping[str, Any]], optimizer: CountingOptimizer
) -> Iterable[tuple[Variable, HostScalar, str]]:
    """Makes a count for all variables of one group with equal ones; returns who gets which."""
    starts = optimizer.own_counts
    made: dict[tuple[Any, ...], StepCount] = {}
    for variable, counts in given.items():
        values = {name: type(start)(counts[name][()]) for name, start in starts.items()}
        group = optimizer._grouping.number_of(variable)
        key = group, *values.values()
        if key not in made:
            step = values.pop(STEP)
            device = variable.device
            beside = {name: _new_number(each, name, device) for name, each in values.items()}
            made[key] = StepCount(step, group, beside, device)
        made[key].members.add(variable.identity)
        for name, number in made[key].all().items():
            yield variable, number, name
