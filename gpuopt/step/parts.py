"""The parts of a step's gradients, and the batches that backends update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gpuopt.device import Device
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.known import Batch, Group
from gpuopt.step.pairs import checked_gradients
from gpuopt.step.rule_protocol import RuleOptimizer
from gpuopt.step.updates import Pair, dtypes_of
from gpuopt.step.wide_gradients import GradientTypes, types_of
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable, as_variable


class Part:
    """Gradients of one group: dense ones of many variables, or a sparse one of one variable.

    Attributes:
        rule: What updates the variables.
        given: The variables, as the caller passed them.
        gradients: An array for each variable, or the IndexedSlices of the only variable. They fit
            after `check`.
        is_averaged: Whether the rule moves the variables' averages, too.
        choice: See `KnownGroups.find`.
        numbers: Where the gradients stand in the caller's list.
        group: The variables' group; None until their slots are made.
        versions: The version of each batch's gradients; see `Group.accept`.
    """

    __slots__ = (
        *("choice", "given", "gradients", "group", "is_averaged", "is_sparse", "numbers"),
        *("rule", "versions"),
    )

    def __init__(
        self,
        rule: UpdateRule,
        given: Sequence[Any],
        gradients: Sequence[Any],
        numbers: Sequence[int],
        group: Group | None,
        is_averaged: bool = False,
        choice: bytes = b"",
    ) -> None:
        self.rule = rule
        self.choice = choice
        self.given = given
        self.gradients = gradients
        self.group = group
        self.is_averaged = is_averaged
        self.numbers = numbers
        self.is_sparse = isinstance(gradients[0], IndexedSlices)
        self.versions: Sequence[int | None] | None = None

    def variables(self) -> list[Variable]:
        every = self.given
        return [each if type(each) is Variable else as_variable(each) for each in every]

    def pairs(self) -> Iterator[Pair]:
        return zip(self.gradients, self.variables(), strict=True)

    def check(self, optimizer: RuleOptimizer, takes_wide: bool) -> None:
        """Raises what is wrong with a gradient, and gives all the form that the group takes."""
        if self.is_sparse and self.group is not None and self._fits(self.group):
            return
        group = None if self.is_sparse else self.group
        types = types_of(optimizer, takes_wide) if takes_wide else optimizer._gradient_types
        if group is not None:
            if types is GradientTypes.FLOATS:
                self.gradients = group.as_read(self.gradients)
            self.versions = group.accept(self.gradients, types)
            if self.versions is not None:
                return
        dtypes = dtypes_of(optimizer)
        self.gradients = checked_gradients(list(self.pairs()), self.numbers, dtypes, types)
        if group is not None:
            self.versions = group.accept(self.gradients, types)

    def _fits(self, group: Group) -> bool:
        """Whether the sparse gradient needs no other check; it gets the variable's shape."""
        [slices], [batch] = self.gradients, group.batches
        values, indices, most = slices.values, slices.indices, batch.backend.most_rows
        shape = batch.plan.accept_rows(values, indices)
        if shape is None or group.constrained or (most is not None and len(indices) > most):
            return False
        if slices.dense_shape is None:
            self.gradients = [slices.replace(values, indices, shape)]
        return slices.dense_shape in (None, shape)

    def identities(self) -> Iterable[Identity]:
        if self.group is not None:
            return self.group.identities
        return [variable.identity for variable in self.variables()]

    def require_group(self) -> Group:
        assert self.group is not None, "create_slots comes first"
        return self.group

    def arrays(self, batch: Batch) -> Sequence[Any]:
        """Returns the arrays of a batch's gradients."""
        if self.is_sparse:
            return [self.gradients[0].values, self.gradients[0].indices]
        return batch.select(self.gradients)

    def copy_arrays(self, batch: Batch, positions: Sequence[int]) -> None:
        """Puts copies in the place of some of `arrays`."""
        if not positions:
            return
        if self.is_sparse:
            arrays = list(self.arrays(batch))
            for position in positions:
                arrays[position] = _copied(arrays[position], batch)
            self.gradients = [self.gradients[0].replace(*arrays, self.gradients[0].dense_shape)]
            return
        self.gradients, self.versions = list(self.gradients), None
        for position in positions:
            at = position if batch.positions is None else batch.positions[position]
            self.gradients[at] = _copied(self.gradients[at], batch)


# What a backend writes at once: one batch of dense variables, or sparse ones of one dtype.
Unit = list[tuple[Part, Batch]]


def units_of(parts: Sequence[Part]) -> list[Unit]:
    """Returns what backends write at once; none overwrites gradients that are read later."""
    units: list[Unit] = []
    sparse: dict[tuple[UpdateRule, Device, np.dtype[Any], np.dtype[Any]], Unit] = {}
    for part in parts:
        for batch in part.require_group().batches:
            unit: Unit = []
            if part.is_sparse:
                of_gradient = part.gradients[0].values.dtype
                unit = sparse.setdefault((part.rule, batch.device, batch.dtype, of_gradient), unit)
            if not unit:
                units.append(unit)
            unit.append((part, batch))
    _copy_what_is_overwritten(units)
    return units


def _copy_what_is_overwritten(units: Sequence[Unit]) -> None:
    """Copies gradients in memory that is written before they are read, or at the same time."""
    by_device: dict[Device, list[Unit]] = {}
    for unit in units:
        by_device.setdefault(unit[0][1].device, []).append(unit)
    for of_device in by_device.values():
        backend = of_device[0][0][1].backend
        plans = [batch.plan for unit in of_device for _, batch in unit]
        if len(plans) == 1:
            continue
        # What is read alone and first is read before anything is written.
        later = of_device[1:] if len(of_device[0]) == 1 else of_device
        arrays = [array for unit in later for part, batch in unit for array in part.arrays(batch)]
        # Most calls have none: one look at all of them is quicker than one at each.
        if not backend.overlapping(plans, arrays):
            continue
        written: list[Any] = []
        for unit in of_device:
            at_once = [batch.plan for _, batch in unit]
            for part, batch in unit:
                others = [*written, *(plan for plan in at_once if plan is not batch.plan)]
                if others:
                    part.copy_arrays(batch, backend.overlapping(others, part.arrays(batch)))
            written += at_once


def _copied(array: Any, batch: Batch) -> Any:
    with batch.backend.enter():
        return array.copy()


def names_of(writes: Iterable[tuple[Part, Batch]]) -> list[str]:
    """Returns the names of the variables of batches."""
    return [
        identity.name
        for part, batch in writes
        for identity in batch.select(part.require_group().identities)
    ]
