"""Sums of gradients over several steps, as state of the optimizer that will be given them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.backends import Target, backend_for
from gpuopt.device import Device
from gpuopt.quietly import quietly
from gpuopt.rules.accumulation import add_to_sum, begin_sum
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import State, check_fits, new_slot_variable
from gpuopt.step.dense_gradients import as_dense
from gpuopt.step.known import Group, KnownGroups
from gpuopt.step.updates import Pair
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.row_changes import register
from gpuopt.variables.variable import Variable, global_variables

Array = Any

_SUM, _ROWS, _VALUES = "gradient_sum", "gradient_rows", "gradient_values"
_COUNT = "accumulated_steps"


class _Sum:
    """What one variable's gradients add up to so far.

    Attributes:
        is_dense: Whether its slot holds a sum.
        slices: (values, rows) of sparse gradients: copies.
        num_unique: How many rows the first of these has, if they are the sum of others.
    """

    def __init__(self, variable: Variable | None) -> None:
        """Begins without gradients.

        Args:
            variable: The variable; None if it is not known since a restore.
        """
        self.is_dense = False
        self.slices: list[tuple[Array, Array]] = []
        self.num_unique = 0
        self.note(variable)

    def note(self, variable: Variable | None) -> None:
        """Remembers the variable, and keeps none alive but those that are made of raw arrays."""
        self._raw = variable if variable is not None and variable.is_raw_array else None
        self._reference = None if variable is None else weakref.ref(variable)

    @property
    def variable(self) -> Variable | None:
        return None if self._reference is None else self._reference()

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.slices)


class GradientSums:
    """The sums of one optimizer. All but `num_steps` is called inside `writing`.

    A dense sum is a slot of the variable's type. The sums of sparse gradients are the gradients
    themselves, and become slots where the state is read. See `Beside`.
    """

    slot_names: Sequence[str] = (_SUM, _ROWS, _VALUES)
    other_names: Sequence[str] = (_COUNT,)

    def __init__(self, optimizer: Any) -> None:
        """Begins without gradients, or with those that its state has.

        Args:
            optimizer: In whose state the sums are.
        """
        # Not by itself: its state has these sums.
        self._reference = weakref.ref(optimizer)
        self._sums: WeakKeyDictionary[Identity, _Sum] = WeakKeyDictionary()
        self._is_restored = True
        self._user: weakref.ref[Any] | None = None
        # See `use`.
        self.most_rows = 0
        self.known = KnownGroups()
        register(self)

    def use(self, user: Any, most_rows: int) -> None:
        """Keeps all others from adding gradients, as long as the user lives.

        Args:
            user: Who adds gradients.
            most_rows: So many rows of a variable's sparse gradients are kept as they are; if there
                are more, and twice as many as different ones, equal rows are added up.

        Raises:
            ValueError: somebody else does.
        """
        if self._user is not None and self._user() is not None:
            raise ValueError(
                f'the gradients of "{self._optimizer.get_name()}" are accumulated by another '
                f"{type(user).__name__} already"
            )
        self._user, self.most_rows = weakref.ref(user), most_rows
        self._state.beside = self

    @property
    def num_steps(self) -> int:
        """How many steps' gradients are summed."""
        count = self._state.other(_COUNT)
        waiting = self._state.waiting_others.get(_COUNT, 0)
        return int(waiting if count is None else count.numpy())

    def add(self, pairs: Sequence[Pair], divisor: int) -> None:
        """Adds the gradients of one step.

        Args:
            pairs: Checked.
            divisor: What dense sums are divided by then: theirs alone who have a dense gradient.
        """
        self._begin()
        dense: list[Pair] = []
        for gradient, variable in pairs:
            found = self._sums.setdefault(variable.identity, _Sum(variable))
            found.note(variable)
            self._take_restored(variable, found)
            if not isinstance(gradient, IndexedSlices):
                if found.slices:
                    self._launch([(self._as_dense(found), variable)])
                dense.append((gradient, variable))
            elif found.is_dense:
                dense.append((self._dense_of(gradient, variable), variable))
            else:
                self._add_slices(gradient, variable, found)
        self._launch(dense, divisor)
        self._counter().add(1)

    def take(
        self, divisor: int, divided: Sequence[Variable] = ()
    ) -> tuple[list[tuple[Any, Variable]], list[Variable]]:
        """Ends the sums: from now on, nothing is summed.

        Args:
            divisor: What sums are divided by.
            divided: Variables whose sums are divided already.

        Returns:
            (gradient, variable) pairs, and the variables that hold the dense ones of the gradients,
            which the next `add` overwrites.
        """
        self._begin()
        own = {variable.identity for variable in divided}
        left: list[Pair] = []
        pairs: list[tuple[Any, Variable]] = []
        totals: list[Variable] = []
        for identity, found in list(self._sums.items()):
            variable = found.variable
            if variable is None:
                continue
            if found.is_dense:
                totals.append(self._total(variable))
                pair = totals[-1].unread_storage, variable
                pairs.append(pair)
                if divisor != 1 and identity not in own:
                    left.append(pair)
            elif found.slices:
                values, rows = _joined(variable, found)
                with backend_for(variable.device).enter():
                    values = values / values.dtype.type(divisor)
                pairs.append((IndexedSlices(values, rows, variable.shape), variable))
        self._launch(left, divisor, begin=True)
        self.reset()
        return pairs, totals

    def reset(self) -> None:
        """Forgets what is summed."""
        self._sums.clear()
        self._is_restored = False
        for key in [key for key in self._state.waiting_slots if key[0] in self.slot_names]:
            del self._state.waiting_slots[key]
        self._counter().assign(0)

    # What a state asks: see `Beside`.

    @contextmanager
    def lay_out(self) -> Iterator[None]:
        laid: list[tuple[str, Identity]] = []
        try:
            for identity, found in list(self._sums.items()):
                if found.slices and found.variable is not None and self.num_steps:
                    for slot_name, array in zip(
                        (_VALUES, _ROWS), _joined(found.variable, found), strict=True
                    ):
                        slot = new_slot_variable(
                            found.variable, slot_name, array, None, array.shape, array.dtype
                        )
                        self._state.table(slot_name)[identity] = slot
                        laid.append((slot_name, identity))
            yield
        finally:
            for slot_name, identity in laid:
                del self._state.table(slot_name)[identity]

    def is_stale(self, slot_name: str, identity: Identity) -> bool:
        if slot_name != _SUM or self._is_restored:
            return False
        found = self._sums.get(identity)
        return found is None or not found.is_dense or not self.num_steps

    def check(
        self, slot_name: str, value: np.ndarray[Any, Any], variable: Variable, what: str
    ) -> None:
        if slot_name == _SUM:
            check_fits(value, what, variable.shape, variable.dtype)
        elif slot_name == _ROWS:
            check_fits(value, what, (len(value),) if value.ndim else (0,), np.dtype(np.int64))
        else:
            height = len(value) if value.ndim else 0
            check_fits(value, what, (height, *variable.shape[1:]), variable.dtype)

    def forget_all(self) -> None:
        for slot_name in self.slot_names:
            table = self._state.table(slot_name)
            for identity in list(table):
                del table[identity]
        self.reset()
        self._is_restored = True

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            found = self._sums.get(variable.identity)
            if found is not None and found.slices and self.num_steps:
                raise ValueError(
                    f'the rows of "{variable.name}" stay as they are while sparse gradients of it '
                    "are accumulated: call apply_accumulated() or reset() of the "
                    "GradientAccumulationOptimizer first"
                )

    # The rest.

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "who adds gradients holds it"
        return optimizer

    @property
    def _state(self) -> State:
        return self._optimizer.state  # type: ignore[no-any-return]

    def _counter(self) -> HostScalar:
        return self._state.create_host_scalar(_COUNT, np.int64(0), Device.cpu)

    def _begin(self) -> None:
        """Takes over what was restored; drops what an update that was undone has left."""
        if not self.num_steps:
            self._sums.clear()
        elif self._is_restored:
            variables = {each.identity: each for each in global_variables()}
            for slot_name in (_SUM, _ROWS):
                for identity in self._state.table(slot_name):
                    found = self._sums.setdefault(identity, _Sum(variables.get(identity)))
                    if slot_name == _SUM:
                        found.is_dense = True
                    elif found.variable is not None:
                        self._take_slices(found.variable, found)
        self._is_restored = False

    def _take_restored(self, variable: Variable, found: _Sum) -> None:
        """Takes over what waits for a variable that was not there when the state was restored."""
        if (_SUM, variable.name) in self._state.waiting_slots:
            self._total(variable)
            found.is_dense = True
        for slot_name in (_ROWS, _VALUES):
            value = self._state.waiting_slots.get((slot_name, variable.name))
            if value is not None:
                self._state.create_slot(
                    variable, slot_name, slot_name, value, value.shape, value.dtype
                )
        self._take_slices(variable, found)

    def _take_slices(self, variable: Variable, found: _Sum) -> None:
        """Takes restored slices out of the state."""
        taken = []
        for slot_name in (_VALUES, _ROWS):
            slot = self._state.slot(variable, slot_name)
            if slot is None:
                return
            taken.append(slot.storage)
        for slot_name in (_VALUES, _ROWS):
            del self._state.table(slot_name)[variable.identity]
        found.slices = [(taken[0], taken[1])]

    def _total(self, variable: Variable) -> Variable:
        """Returns the slot of a variable's dense sum."""
        total = self._state.slot(variable, _SUM)
        if total is None:
            total = self._state.create_slot(variable, _SUM, _SUM, 0.0)
        return total

    def _target(self, variable: Variable) -> tuple[Target, list[Identity]]:
        total = self._total(variable)
        return Target(total.unread_storage, []), [total.identity]

    def _launch(self, pairs: Sequence[Pair], divisor: int = 1, *, begin: bool = False) -> None:
        """Adds dense gradients to sums.

        Args:
            pairs: Theirs.
            divisor: What the sums are divided by then.
            begin: Has sums begin anew that have begun.
        """
        by_rule: dict[UpdateRule, list[Pair]] = {}
        for pair in pairs:
            found = self._sums[pair[1].identity]
            rule = add_to_sum if found.is_dense and not begin else begin_sum
            by_rule.setdefault(rule, []).append(pair)
        for rule, some in by_rule.items():
            quietly(partial(self._launch_one, rule, some, divisor))
        for _, variable in pairs:
            self._sums[variable.identity].is_dense = True

    def _launch_one(self, rule: UpdateRule, pairs: Sequence[Pair], divisor: int) -> None:
        gradients, variables = zip(*pairs, strict=True)
        version = self._state.version.number
        group = self.known.find(variables, version)
        if group is None:
            group = Group(variables, version, self._target, lambda _: 0)
            self.known.add(variables, group)
        versions = group.accept(gradients)
        for batch in group.batches:
            batch.backend.apply_dense(
                rule,
                batch.plan,
                batch.select(gradients),
                [{"divisor": batch.real(divisor)}],
                version=None if versions is None else versions[batch.number],
            )

    def _add_slices(self, slices: IndexedSlices, variable: Variable, found: _Sum) -> None:
        backend = backend_for(variable.device)
        with backend.enter():
            copies = slices.values.copy(), slices.indices.astype(np.int64)
        found.slices.append(copies)
        if found.num_rows > max(self.most_rows, 2 * found.num_unique):
            self._check_rows(found.slices, variable)
            found.slices = [backend.sum_duplicate_rows(*_joined(variable, found))]
            found.num_unique = found.num_rows

    def _as_dense(self, found: _Sum) -> Array:
        """Returns an array that sparse gradients add up to, and forgets these."""
        assert found.variable is not None
        values, rows = _joined(found.variable, found)
        found.slices, found.num_unique = [], 0
        return self._dense_of(IndexedSlices(values, rows, found.variable.shape), found.variable)

    def _dense_of(self, slices: IndexedSlices, variable: Variable) -> Array:
        self._check_rows([(slices.values, slices.indices)], variable)
        return as_dense(backend_for(variable.device), slices, variable, None)

    def _check_rows(self, slices: Sequence[tuple[Array, Array]], variable: Variable) -> None:
        """Raises IndexError if a row is not there; waits for a GPU that knows."""
        pairs: list[Pair] = [(IndexedSlices(*each, variable.shape), variable) for each in slices]
        row_checks = self._optimizer.row_checks
        row_checks.call(_nothing, pairs, lambda: _undo_nothing, lambda: True)


def _joined(variable: Variable, found: _Sum) -> tuple[Array, Array]:
    """Returns the values and rows of all sparse gradients, one after the other."""
    if len(found.slices) == 1:
        return found.slices[0]
    values, rows = zip(*found.slices, strict=True)
    backend = backend_for(variable.device)
    with backend.enter():
        return backend.xp.concatenate(values), backend.xp.concatenate(rows)


def _nothing() -> None:
    pass


def _undo_nothing(refused: Any) -> None:
    pass
