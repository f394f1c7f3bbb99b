"""Updates by sparse gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import Scalars, SparseUpdate, compute_type
from gpuopt.backends.record import StepRecord
from gpuopt.rules.accumulation import place_sum
from gpuopt.rules.staged import of_named_rows, staged
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import MASTER, kept_dtype
from gpuopt.step.known import Batch
from gpuopt.step.rows_behind import update_tables
from gpuopt.step.rule_protocol import RuleOptimizer
from gpuopt.step.tables_behind import table_behind
from gpuopt.step.updated_arrays import checked_slot
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


class SparsePart(Protocol):
    """The part of a step that has the gradient of one table."""

    gradients: Any

    def variables(self) -> list[Variable]: ...

    def arrays(self, batch: Batch) -> Sequence[Any]: ...


def apply_sparse(
    optimizer: RuleOptimizer,
    unit: Sequence[tuple[SparsePart, Batch]],
    rule: UpdateRule,
    numbers: Sequence[int],
    scalars: Sequence[Scalars],
    record: StepRecord,
    kept: Sequence[Any],
) -> None:
    """Updates the rows of sparse gradients, and the other rows where the rule has one for them.

    Args:
        optimizer: Whose step this is.
        unit: Parts with a sparse gradient each, of one device and dtype.
        rule: What updates the rows.
        numbers: The parameter groups that `scalars` are for.
        scalars: The rule's: one for each of `numbers`, and again for each count of steps that a GPU
            may have reached.
        record: Of their device: see `StepRecord`.
        kept: What must live until the update is done.
    """
    other_rows = optimizer.rule_of_other_rows
    if other_rows is not None:
        for stage in rule.stages:  # of the same slots
            other_rows = staged(other_rows, stage.idle) if stage.slots else other_rows
    updates = [
        SparseUpdate(batch.plan, *part.arrays(batch))._replace(
            group=numbers.index(batch.scalar_groups[0])
        )
        for part, batch in unit
    ]
    if other_rows is not None and optimizer.catch_up:
        left = _left_by_catching_up(optimizer, unit, rule, other_rows, updates, scalars, record)
        if not left:
            return
        unit, updates = [unit[at] for at in left], [updates[at] for at in left]
    if other_rows is not None:
        for stage in rule.stages:  # they are stored alike
            other_rows = staged(other_rows, stage) if stage.is_of("store") else other_rows
        for part, _ in unit:
            num_rows = len(part.gradients[0].indices)
            optimizer.plans.misuse.hint_at_cost(part.variables()[0], num_rows)
    unit[0][1].backend.apply_sparse(
        rule, updates, scalars, other_rows=other_rows, record=record, kept=kept
    )


def _left_by_catching_up(
    optimizer: RuleOptimizer,
    unit: Sequence[tuple[SparsePart, Batch]],
    rule: UpdateRule,
    other_rows: UpdateRule,
    updates: Sequence[SparseUpdate],
    scalars: Sequence[Scalars],
    record: StepRecord,
) -> list[int]:
    """Updates tables whose rows may fall behind; returns the positions of the others."""
    left: list[int] = []
    waiting: Sequence[int] = range(len(unit))
    while waiting:
        tables = []
        for part, batch in (unit[at] for at in waiting):
            [variable] = part.variables()
            names = optimizer.options.codecs.array_names(rule.slots)
            slots = [checked_slot(optimizer, variable, name) for name in names]
            if (master := optimizer.state.slot(variable, MASTER)) is not None:
                slots.append(master)
            tables.append(table_behind(optimizer.state, variable, slots, batch))
        done = update_tables(
            tables,
            rule,
            other_rows,
            [updates[at] for at in waiting],
            scalars,
            record,
            stepping=optimizer.catch_up == "stepping",
        )
        answers = list(zip(waiting, done, strict=True))
        left += [at for at, is_updated in answers if is_updated is False]
        # Tables that are another optimizer's by now.
        waiting = [at for at, is_updated in answers if is_updated is None]
    return left


def apply_as_dense(
    optimizer: RuleOptimizer,
    unit: Sequence[tuple[SparsePart, Batch]],
    rule: UpdateRule,
    numbers: Sequence[int],
    scalars: Sequence[Scalars],
    record: StepRecord,
    kept: Sequence[Any],
) -> None:
    """Updates by sparse gradients as by dense ones, whose other rows are 0: for rules with sums.

    The arguments are those of `apply_sparse`.
    """
    rule = of_named_rows(rule)
    for part, batch in unit:
        [variable] = part.variables()
        dtype = kept_dtype(variable.dtype, optimizer.options.codecs.masters)
        batch.backend.apply_dense(
            rule,
            batch.plan,
            [as_dense(batch.backend, part.gradients[0], variable, dtype, record.refused)],
            # Of each count.
            scalars[numbers.index(batch.scalar_groups[0]) :: len(numbers)],
            record=record,
            kept=[*kept, part.gradients],
        )


def as_dense(
    backend: Backend,
    slices: IndexedSlices,
    variable: Variable,
    dtype: np.dtype[Any],
    refused: Any,
) -> Any:
    """Returns a gradient of a variable's shape and device; the host does not wait for it.

    Repeated rows are summed as in a sparse update, and then rounded to the dtype. Rows that are not
    named are -0, and no other element is: see `Stage.of_named_rows`.

    Args:
        backend: The device's.
        slices: On the device.
        variable: What they are the gradient of.
        dtype: The result's: the variable's, or its slots'.
        refused: See `StepRecord`.
    """
    with backend.enter():
        dense = backend.xp.full(variable.shape, -0.0, dtype)
    plan = backend.plan_dense([Target(dense, [])])
    update = SparseUpdate(plan, slices.values, slices.indices)
    scalars, record = {"zero": compute_type(dtype)(0)}, StepRecord(refused)
    backend.apply_sparse(place_sum, [update], [scalars], other_rows=None, record=record)
    return dense
