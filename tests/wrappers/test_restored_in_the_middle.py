"""A run goes on in the middle of accumulation.

tests/fuzz/test_all_stages.py has the same with each stage, and with a scale that grows.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("most_rows", [1, 4, 8])
def test_equal_rows_are_added_up_when_they_would_have_been(most_rows: int) -> None:
    def make() -> tuple[Variable, gpuopt.GradientAccumulationOptimizer]:
        inner = gpuopt.GradientDescentOptimizer(1.0)
        optimizer = gpuopt.GradientAccumulationOptimizer(inner, 6, most_rows=most_rows)
        return Variable(np.zeros((6, 5), np.float32), name="table"), optimizer

    def train(run: tuple[Variable, Any], calls: range) -> None:
        for call in calls:
            values = np.random.default_rng(call).normal(size=(5, 5)).astype(np.float32)
            slices = IndexedSlices(values, np.array([0, 2, 2, 5, call % 6]))
            run[1].apply_gradients([(slices, run[0])])

    expected = make()
    train(expected, range(12))
    for stop in range(1, 12):
        before, after = make(), make()
        train(before, range(stop))
        state = before[1].state_dict({"table": before[0]})
        after[0].assign(before[0].numpy())
        after[1].load_state_dict(state, {"table": after[0]})
        train(after, range(stop, 12))
        np.testing.assert_array_equal(after[0].numpy(), expected[0].numpy(), err_msg=str(stop))


def test_a_restore_before_the_first_step_makes_no_second_count(tmp_path: Path) -> None:
    def num_counts() -> int:
        gc.collect()
        return sum("accumulated_steps" in each.name for each in gpuopt.global_variables())

    before = num_counts()
    optimizer = gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(0.1), 2)
    variable = Variable(np.ones(4, np.float32), name="w")
    saver = gpuopt.Saver()
    saver.restore(saver.save(tmp_path / "before"))
    optimizer.apply_gradients([(np.ones(4, np.float32), variable)])
    assert optimizer.accumulated_steps == 1
    assert num_counts() == before + 1


@pytest.mark.parametrize(
    ("there", "here"),
    [(None, "float32"), ("float32", "remainder"), ("remainder", None), ("remainder", "remainder")],
)
def test_sums_go_on_with_other_master_copies_or_without(there: Any, here: Any) -> None:
    """Sums of 16-bit variables are of float32 either way."""
    variables, optimizers = [], []
    for masters in (there, here):
        options = {} if masters is None else {"masters": masters}
        variables.append(Variable(np.ones((3, 2), ml_dtypes.bfloat16)))
        inner = gpuopt.AdamOptimizer(0.1, **options)
        optimizers.append(gpuopt.GradientAccumulationOptimizer(inner, 3))
    for number in range(5):  # their sums are no numbers of bfloat16
        gradient = np.full((3, 2), number + 1 / 6, np.float32).astype(ml_dtypes.bfloat16)
        optimizers[0].apply_gradients([(gradient, variables[0])])
    variables[1].assign(variables[0].numpy())
    state = optimizers[0].state_dict({"w": variables[0]})
    optimizers[1].load_state_dict(state, {"w": variables[1]})
    assert optimizers[1].accumulated_steps == 2
    again = optimizers[1].state_dict({"w": variables[1]})
    sums = [each["slots"]["gradient_sum"]["w"] for each in (state, again)]
    assert sums[0].dtype == np.float32
    np.testing.assert_array_equal(*sums)
