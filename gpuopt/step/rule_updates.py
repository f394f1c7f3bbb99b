"""What one step updates by an update rule: dense variables together, then each sparse one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any, ClassVar, Protocol

import numpy as np

from gpuopt.backends import Target, array_types
from gpuopt.backends.backend import Scalars
from gpuopt.quietly import quietly
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.known import Batch, Group, KnownGroups
from gpuopt.step.overlap import refuse_shared_memory
from gpuopt.step.pairs import as_pairs, checked_gradient, refuse_no_gradients, unpacked
from gpuopt.step.row_checks import RowChecks
from gpuopt.step.updates import HookOptimizer, Pair, apply_constraint, dtypes_of
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable, as_variable


class RuleOptimizer(HookOptimizer, Protocol):
    """What `RuleUpdates` asks of an optimizer."""

    rule: UpdateRule
    touches_all_rows: ClassVar[bool]
    known: KnownGroups
    row_checks: RowChecks

    @property
    def finish_is_undoable(self) -> bool: ...

    def _target(self, variable: Variable) -> tuple[Target, list[Identity]]: ...

    def _hint_at_cost(self, table: Variable, num_rows: int) -> None: ...

    def _scalars(self, real: type[np.floating[Any]]) -> Scalars: ...


class _Part:
    """Gradients of one group: dense ones of many variables, or a sparse one of one variable.

    Attributes:
        given: The variables, as the caller passed them.
        gradients: Arrays that fit them; or IndexedSlices alone.
        group: The variables' group; None until their slots are made.
        versions: Of each batch's gradients; see `Group.accept`.
    """

    __slots__ = ("given", "gradients", "group", "is_sparse", "versions")

    def __init__(
        self, given: Sequence[Any], gradients: Sequence[Any], group: Group | None = None
    ) -> None:
        self.given = given
        self.gradients = gradients
        self.group = group
        self.is_sparse = isinstance(gradients[0], IndexedSlices)
        self.versions: Sequence[int | None] | None = None

    def variables(self) -> list[Variable]:
        return [as_variable(each) for each in self.given]

    def pairs(self) -> Iterator[Pair]:
        return zip(self.gradients, self.variables(), strict=True)

    def identities(self) -> Iterable[Identity]:
        if self.group is not None:
            return self.group.identities
        return [variable.identity for variable in self.variables()]

    def known(self) -> Group:
        assert self.group is not None, "create_slots comes first"
        return self.group

    def copy_overlapping(self, before: Batch, batch: Batch) -> None:
        """Copies those gradients of a batch that share memory with what another batch writes."""
        if self.is_sparse:
            slices = self.gradients[0]
            arrays = [slices.values, slices.indices]
            for position in before.plan.overlapping(arrays):
                arrays[position] = _copied(arrays[position], batch)
            self.gradients = [slices.replaced(*arrays, slices.dense_shape)]
            return
        overlapping = before.plan.overlapping(batch.select(self.gradients))
        if overlapping:
            self.gradients, self.versions = list(self.gradients), None
            for position in overlapping:
                at = position if batch.positions is None else batch.positions[position]
                self.gradients[at] = _copied(self.gradients[at], batch)


class RuleUpdates:
    """The updates of one step by one rule."""

    def __init__(self, optimizer: RuleOptimizer, given: list[Any]) -> None:
        """Sets the pairs apart and checks them; those known from earlier steps are cheap."""
        self._optimizer = optimizer
        self._parts: list[_Part] = []
        # (part, batch) that writes now, and those that have written.
        self._writing: tuple[_Part, Batch] | None = None
        self._done: list[tuple[_Part, Batch]] = []
        self.has_rows_on_a_gpu = False
        if set(map(type, given)) != {tuple} or set(map(len, given)) != {2}:
            given = as_pairs(given)
        gradients, variables, others = _set_apart(given)
        if gradients:
            self._parts.append(self._dense_part(variables, gradients, given, others))
        converted: list[tuple[Any, Any]] = []
        for position in others:
            gradient, variable = unpacked(position, given[position])
            if gradient is None:
                continue
            checked = checked_gradient(gradient, variable, dtypes_of(optimizer))
            if isinstance(checked, IndexedSlices):
                self.has_rows_on_a_gpu |= variable.device.kind == "gpu"
                table = [given[position][1]]
                group = optimizer.known.find(table, optimizer.state.version)
                self._parts.append(_Part(table, [checked], group))
            else:
                converted.append((checked, given[position][1]))
        if converted:
            arrays, listed = zip(*converted, strict=True)
            self._parts.append(self._dense_part(listed, arrays, converted, []))
        if not self._parts:
            refuse_no_gradients([unpacked(*each)[1] for each in enumerate(given)])

    def pairs(self) -> Sequence[Pair]:
        return [pair for part in self._parts for pair in part.pairs()]

    def sparse_pairs(self) -> Sequence[Pair]:
        return [pair for part in self._parts if part.is_sparse for pair in part.pairs()]

    def identities(self) -> Iterable[Identity]:
        return chain.from_iterable(part.identities() for part in self._parts)

    def refuse_shared_memory(self, counter: Variable | None) -> None:
        groups = [part.group for part in self._parts if part.group is not None]
        if len(groups) < len(self._parts):
            self._look_for_shared_memory(counter)
            return
        first, *others = groups
        members: list[Group | Identity] = [*others]
        if counter is not None:
            members.append(counter.identity)
        if members and not first.is_known_apart(members):
            self._look_for_shared_memory(counter)
            first.note_apart(members)

    def _look_for_shared_memory(self, counter: Variable | None) -> None:
        variables = [variable for part in self._parts for variable in part.variables()]
        state = self._optimizer.state
        slots = [slot for variable in variables for slot in state.slots_of(variable)]
        refuse_shared_memory(variables, [*slots, *([] if counter is None else [counter])])

    def create_slots(self) -> None:
        unknown = [part for part in self._parts if part.group is None]
        if not unknown:
            return
        state = self._optimizer.state
        with writing(), state.lock:
            self._optimizer._create_slots([v for part in unknown for v in part.variables()])
            for part in unknown:
                group = Group(part.variables(), state.version, self._optimizer._target)
                self._optimizer.known.add(part.given, group)
                part.group = group
                if not part.is_sparse:
                    part.versions = group.accept(part.gradients)

    def check_again(self) -> None:
        version = self._optimizer.state.version
        for part in self._parts:
            group = part.known()
            if part.is_sparse or (versions := group.accept(part.gradients)) is None:
                for gradient, variable in part.pairs():
                    checked_gradient(gradient, variable, dtypes_of(self._optimizer))
                versions = None
            part.versions = versions
            if group.state_version != version:
                part.group = None
        self.create_slots()

    def must_check_first(self) -> bool:
        return not self._optimizer.finish_is_undoable or any(
            part.known().constrained for part in self._parts
        )

    def apply(self) -> list[Any]:
        self.write()
        for part in self._parts:
            for position in part.known().constrained:
                apply_constraint(part.given[position])
        return []

    def write(self) -> None:
        """Applies the rule, and no constraints."""
        quietly(self._write)

    def _write(self) -> None:
        optimizer = self._optimizer
        updates = [(part, batch) for part in self._parts for batch in part.known().batches]
        if len(updates) > 1:
            _copy_what_is_overwritten(updates)
        scalars = {real: optimizer._scalars(real) for real in {batch.real for _, batch in updates}}
        for part, batch in updates:
            self._writing = part, batch
            # Rows of host memory have been looked at already.
            has_flag = batch.backend.row_flags is not None
            refused = optimizer.row_checks.flag(batch.device) if has_flag else None
            if part.is_sparse:
                self._apply_sparse(part, batch, scalars[batch.real], refused)
            else:
                batch.backend.apply_dense(
                    optimizer.rule,
                    batch.plan,
                    batch.select(part.gradients) if batch.positions else part.gradients,
                    scalars[batch.real],
                    version=None if part.versions is None else part.versions[batch.number],
                    refused=refused,
                )
            self._done.append((part, batch))
        self._writing = None

    def written(self) -> tuple[list[str], list[str]]:
        unsure = [] if self._writing is None else [self._writing]
        return _names(self._done), _names(unsure)

    def _dense_part(
        self,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        given: list[Any],
        others: list[int],
    ) -> _Part:
        """Finds the group of dense gradients, or checks each of them.

        Args:
            variables: As the caller passed them.
            gradients: Arrays of any device.
            given: The pairs that these are from.
            others: The positions of those that they are not from.
        """
        known = self._optimizer.known
        part = _Part(variables, gradients, known.find(variables, self._optimizer.state.version))
        versions = None if part.group is None else part.group.accept(gradients)
        if versions is None:
            dtypes = dtypes_of(self._optimizer)
            positions = sorted(set(range(len(given))).difference(others))
            part.gradients = [
                checked_gradient(*unpacked(position, given[position]), dtypes)
                for position in positions
            ]
            if part.group is not None:
                versions = part.group.accept(part.gradients)
        part.versions = versions
        return part

    def _apply_sparse(self, part: _Part, batch: Batch, scalars: Scalars, refused: Any) -> None:
        slices = part.gradients[0]
        touches_all_rows = self._optimizer.touches_all_rows
        if touches_all_rows:
            self._optimizer._hint_at_cost(part.variables()[0], len(slices.indices))
        batch.backend.apply_sparse(
            self._optimizer.rule,
            batch.plan,
            slices.values,
            slices.indices,
            scalars,
            touches_all_rows=touches_all_rows,
            refused=refused,
        )


def _copy_what_is_overwritten(updates: Sequence[tuple[_Part, Batch]]) -> None:
    """Copies gradients in memory that an earlier update of the call writes to."""
    for number, (part, batch) in enumerate(updates):
        for _, before in updates[:number]:
            if before.device == batch.device:
                part.copy_overlapping(before, batch)


def _set_apart(given: list[Any]) -> tuple[Sequence[Any], Sequence[Any], list[int]]:
    """Returns the gradients that are plain arrays, their variables, and where the others are."""
    gradients, variables = zip(*given, strict=True)
    if array_types.issuperset(map(type, gradients)):
        return gradients, variables, []
    is_plain = list(map(array_types.__contains__, map(type, gradients)))
    others = [position for position, is_dense in enumerate(is_plain) if not is_dense]
    return tuple(compress(gradients, is_plain)), tuple(compress(variables, is_plain)), others


def _copied(array: Any, batch: Batch) -> Any:
    with batch.backend.enter():
        return array.copy()


def _names(writes: Iterable[tuple[_Part, Batch]]) -> list[str]:
    return [
        identity.name
        for part, batch in writes
        for identity in batch.select(part.known().identities)
    ]
