"""Moves of many averages at once: one update for each device, and type of averages and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from gpuopt.backends import Target, backend_for, to_device
from gpuopt.backends.backend import Scalars, codecs_of
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.codecs import Codecs
from gpuopt.rules.accumulation import begin_sum
from gpuopt.rules.averaged import moving_average
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.averages import AverageWeights
from gpuopt.step.known import Batch, Group, KnownGroups
from gpuopt.variables.identity import Identity, followed
from gpuopt.variables.operators import reading, storage_of
from gpuopt.variables.recording import before_write
from gpuopt.variables.row_changes import register_plans
from gpuopt.variables.variable import Variable

_Pair = tuple[Variable, Any]


class AverageUpdates:
    """Updates averages by rules whose variables they are, and whose gradients are the values.

    To be called inside `writing`, and by `ignore_fp_warnings`.
    """

    def __init__(self) -> None:
        self._known = KnownGroups()
        register_plans(self)

    def forget_plans(self, changed: Set[Identity]) -> None:
        """See `PlanHolder`."""
        self._known.forget(changed)

    def move(
        self, averages: Sequence[Variable], values: Sequence[Any], weights: AverageWeights
    ) -> None:
        """Moves averages, as if one after the other.

        Args:
            averages: Of floating point.
            values: What each follows: a variable, or an array of its shape on any device.
            weights: Those of the values.
        """
        with _writing_to(averages):
            for some, theirs in _at_once(averages, values):
                for batch, read in self._batches(some, theirs):
                    _update(batch, read, *weights.join(moving_average, batch.device, batch.real))

    def divide(
        self, averages: Sequence[Variable], values: Sequence[Variable], divisor: np.floating[Any]
    ) -> None:
        """Makes averages what other ones are, divided.

        Args:
            averages: Of floating point.
            values: For each, one of its shape, device and type.
            divisor: Of any floating type.
        """
        with _writing_to(averages):
            for batch, read in self._batches(averages, values):
                _update(batch, read, begin_sum, [{"divisor": batch.real(divisor)}])

    def _batches(
        self, averages: Sequence[Variable], values: Sequence[Any]
    ) -> Iterator[tuple[Batch, Sequence[Any]]]:
        """Finds or makes the plans for averages; returns each with the values of its averages."""
        by_type: dict[np.dtype[Any], list[_Pair]] = {}
        for pair in zip(averages, values, strict=True):
            by_type.setdefault(pair[1].dtype, []).append(pair)
        for pairs in by_type.values():
            some, theirs = zip(*pairs, strict=True)
            group = self._known.find(some, 0)
            if group is None:
                group = Group(some, 0, _target, _parameter_group)
                self._known.add(group)
            for batch in group.batches:
                yield batch, batch.select(theirs)


@contextmanager
def _writing_to(averages: Sequence[Variable]) -> Iterator[None]:
    before_write(averages)
    with ExitStack() as stack:
        for average in averages:
            average.bring_up()  # one that is trained, too
            stack.enter_context(followed(average.identity, nullcontext()))
        yield


def _update(
    batch: Batch,
    read: Sequence[Any],
    rule: UpdateRule,
    scalars: Sequence[Scalars],
    record: StepRecord = NOTHING_KNOWN,
) -> None:
    arrays = [storage_of(each) for each in read]
    identities = [each.identity for each in read if isinstance(each, Variable)]
    batch.backend.refuse_capture("what reads, updates or makes variables")
    batch.backend.apply_dense(
        rule,
        batch.plan,
        arrays,
        scalars,
        record=record,
        version=batch.plan.accept(arrays),
        read=identities,
    )


def _at_once(
    averages: Sequence[Variable], values: Sequence[Any]
) -> Iterator[tuple[list[Variable], list[Any]]]:
    """Divides averages, in order, into those that can be moved together, and brings their values.

    One that is there twice moves twice, and averages may follow each other.
    """
    owners = {id(each.identity) for each in (*averages, *values) if isinstance(each, Variable)}
    if len(owners) == len(averages) + len(values):
        yield list(averages), list(map(_brought, values, averages))
        return
    some: dict[Variable, Any] = {}
    read: set[Variable] = set()
    for average, value in zip(averages, values, strict=True):
        is_variable = isinstance(value, Variable)
        if average in some or average in read or (is_variable and value in some):
            yield list(some), list(some.values())
            some, read = {}, set()
        some[average] = _brought(value, average)
        if is_variable:
            read.add(value)
    if some:
        yield list(some), list(some.values())


def _brought(value: Any, average: Variable) -> Any:
    """Returns a value as an update of its average takes it: a variable as it is, if it can be."""
    # An update of doubles has no gradients of another type, and they are none of other updates.
    doubles = np.dtype(np.float64) in (value.dtype, average.dtype)
    is_converted = doubles and value.dtype != average.dtype
    if isinstance(value, Variable) and value.device == average.device and not is_converted:
        return value
    backend = backend_for(average.device)
    with reading(value), backend.enter():
        array = backend.as_array(to_device(storage_of(value), average.device))
        return array.astype(average.dtype) if is_converted else array


def _target(average: Variable) -> tuple[Target, list[Identity], Codecs]:
    target = Target(average.unread_storage, [])
    return target, [average.identity], codecs_of(target)


def _parameter_group(average: Variable) -> int:
    return 0
