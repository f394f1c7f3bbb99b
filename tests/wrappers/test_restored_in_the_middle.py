"""A run goes on in the middle of accumulation and of growth of its loss scale, with each stage."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stages import STAGES

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.contract

SHAPES = {"w0": (3, 4), "w1": (5,), "w2": (), "table": (9, 2)}
ACCUMULATED, NUM_CALLS, BAD_CALL = 3, 12, 4
# In the middle of the first update; after the bad call; one update before the scale grows.
STOPS = (1, 5, 10)
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Any]] = {
    **{name: (make, np.float32) for name, make in STAGES.items()},
    "masters": (lambda: gpuopt.AdamOptimizer(masters="float32"), np.float16),
    "remainders": (lambda: gpuopt.AdamOptimizer(masters="remainder"), ml_dtypes.bfloat16),
    "rounding": (lambda: gpuopt.AdamOptimizer(stochastic_rounding=7), ml_dtypes.bfloat16),
    "averages": (gpuopt.AdamOptimizer, np.float32),
}


class Model:
    """Variables that are trained by gradients of several calls, whose loss is scaled."""

    def __init__(self, stage: str) -> None:
        make, self.dtype = OPTIMIZERS[stage]
        self.variables = {
            name: Variable(np.ones(shape, self.dtype), name=name) for name, shape in SHAPES.items()
        }
        options = {}
        if stage == "averages":
            options["averages"] = gpuopt.ExponentialMovingAverage(0.5)
            options["averages"].track(list(self.variables.values()))  # made before a restore
        self.scaling = gpuopt.LossScaleOptimizer(
            make(**options), gpuopt.DynamicLossScale(8.0, 2, 2.0)
        )
        self.optimizer = gpuopt.GradientAccumulationOptimizer(self.scaling, ACCUMULATED)

    def train(self, first: int, last: int) -> None:
        for call in range(first, last):
            rng = np.random.default_rng(call)
            pairs: list[Any] = []
            for name, variable in self.variables.items():
                shape = (5, 2) if name == "table" else variable.shape
                gradient: Any = np.asarray(rng.normal(size=shape)).astype(self.dtype)
                if name == "table":
                    gradient = IndexedSlices(gradient, rng.integers(0, 9, 5))
                pairs.append((gradient, variable))
            if call == BAD_CALL:
                pairs[0] = np.full(SHAPES["w0"], np.inf, self.dtype), self.variables["w0"]
            self.optimizer.apply_gradients(pairs)

    def values(self) -> dict[str, Any]:
        """Returns the bits of all that there is, and the names of slots and counts."""
        names = sorted(each.name for each in self.optimizer.variables())
        state = self.optimizer.state_dict()
        of_slots = {
            f"{slot} of {name}": value.tobytes()
            for slot, by_name in state["slots"].items()
            for name, value in by_name.items()
        }
        others = {name: np.asarray(value).tobytes() for name, value in state["non_slots"].items()}
        every = {
            each.name: each.numpy().tobytes()
            for each in gpuopt.global_variables()
            if each.name in SHAPES or "MovingAverage" in each.name
        }
        return {"names": names, **every, **of_slots, **others}


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (stage, way)
        for stage in OPTIMIZERS
        for way in ("saver", "state_dict")
        if (stage, way) != ("averages", "state_dict")  # averages are variables, beside a state
    ],
)
@pytest.mark.one_in(8)
def test_a_run_goes_on_to_the_same_bits(stage: str, way: str, tmp_path: Path) -> None:
    model = Model(stage)
    model.train(0, NUM_CALLS)
    expected = model.values()
    scaling = model.scaling
    assert (scaling.loss_scale, scaling.num_skipped) == (8, 1)  # it was 4 in between
    del model, scaling
    gc.collect()
    for stop in STOPS:
        model = Model(stage)
        model.train(0, stop)
        if way == "saver":
            path = gpuopt.Saver().save(str(tmp_path / f"model-{stop}"))
            del model
            gc.collect()
            model = Model(stage)
            gpuopt.Saver().restore(path)
        else:
            values = {name: each.numpy() for name, each in model.variables.items()}
            state = model.optimizer.state_dict()
            del model
            gc.collect()
            model = Model(stage)
            for name, value in values.items():
                model.variables[name].assign(value)
            model.optimizer.load_state_dict(state)
        assert model.optimizer.accumulated_steps == stop % ACCUMULATED
        model.train(stop, NUM_CALLS)
        got = model.values()
        assert [name for name in expected if got.get(name) != expected[name]] == []
        del model
        gc.collect()


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
