"""Updates by the CUDA backend on the CPU, and what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from dtypes import DTYPES_BY_NAME
from emulator.emulator import EmulatorLauncher

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import SparseUpdate, compute_type
from gpuopt.backends.cuda.launcher import LaunchSequence
from gpuopt.backends.cuda.sorted_rows import add_sort
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.backends.record import StepRecord
from gpuopt.rules.update_rule import UpdateRule


class Update(NamedTuple):
    """A variable and its slots, and a gradient for them."""

    var: np.ndarray
    grad: np.ndarray
    slots: list[np.ndarray]
    rows: Any = None


def apply_dense(
    backend: Backend,
    rule: UpdateRule,
    updates: Sequence[Update],
    scalars: dict[str, Any],
    refused: Any = None,
) -> None:
    plan = backend.plan_dense([Target(update.var, update.slots) for update in updates])
    gradients, record = [update.grad for update in updates], StepRecord(refused)
    backend.apply_dense(rule, plan, gradients, [scalars], record=record)


def apply_sparse(
    backend: Backend,
    rule: UpdateRule,
    update: Update,
    scalars: dict[str, Any],
    all_rows: bool,
    refused: Any = None,
) -> None:
    plan = backend.plan_dense([Target(update.var, update.slots)])
    backend.apply_sparse(
        rule,
        [SparseUpdate(plan, update.grad, update.rows)],
        [scalars],
        other_rows=rule if all_rows else None,
        record=StepRecord(refused),
    )


class Arrays:
    """Random arrays of one dtype and rule, from one seed."""

    def __init__(self, rule: UpdateRule, dtype: str, seed: int = 0) -> None:
        self.rule, self.dtype = rule, DTYPES_BY_NAME[dtype]
        self._rng = np.random.default_rng(seed)

    def scalars(self) -> dict[str, Any]:
        real = compute_type(self.dtype)
        return {name: real(self._rng.uniform(0.1, 0.9)) for name in self.rule.scalars}

    def gradient(self, *shape: int) -> np.ndarray:
        return self._rng.normal(size=shape).astype(self.dtype)

    def update(self, *shape: int, grad: Any = None, rows: Any = None) -> Update:
        # A mean's square stays below the mean of squares, lest their difference have no digits.
        ranges = [(0, 0.5) if name == "mg" else (1, 2) for name in self.rule.slots]
        slots = [
            self._rng.uniform(*range_, self.rule.slot_shape(name, shape)).astype(self.dtype)
            for name, range_ in zip(self.rule.slots, ranges, strict=True)
        ]
        grad = self.gradient(*shape) if grad is None else grad
        return Update(self._rng.normal(size=shape).astype(self.dtype), grad, slots, rows)


def copy_of(update: Update) -> Update:
    return update._replace(var=update.var.copy(), slots=[slot.copy() for slot in update.slots])


def check(got: Sequence[Update], expected: Sequence[Update], sum_error: float = 0.0) -> None:
    """Compares within some eps: only fused operations round differently. `sum_error` is in eps."""
    for mine, theirs in zip(got, expected, strict=True):
        dtype = mine.var.dtype
        tolerance = (32 + sum_error) * float(ml_dtypes.finfo(dtype).eps)
        for a, b in zip((mine.var, *mine.slots), (theirs.var, *theirs.slots), strict=True):
            np.testing.assert_allclose(
                a.astype(np.float64), b.astype(np.float64), rtol=tolerance, atol=tolerance
            )


def sparse_case(arrays: Arrays, height: int, width: int, rows: np.ndarray) -> tuple[Update, Update]:
    update = arrays.update(height, width, grad=arrays.gradient(rows.size, width), rows=rows)
    return update, copy_of(update)


def check_sorted(
    launcher: EmulatorLauncher, rows: np.ndarray, height: int, workspace: Workspace | None = None
) -> None:
    """Sorts rows and compares with numpy's stable sort."""
    workspace = workspace or Workspace(launcher)
    sequence, flag = LaunchSequence(), np.zeros(2, np.uint64)
    found = add_sort(sequence, launcher, workspace, rows, height, flag)
    sequence.start(rows)
    order = np.argsort(rows, kind="stable")
    assert found.positions.tolist() == order.tolist()
    assert found.keys.tolist() == rows[order].tolist()
