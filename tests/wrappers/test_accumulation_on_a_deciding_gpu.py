"""A GPU decides about updates by accumulated gradients, which wait for nothing either."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import driver
import ml_dtypes
import numpy as np
import pytest
from gpu_streams import new_stream

import gpuopt
from gpuopt import (
    ExponentialMovingAverage,
    GradientAccumulationOptimizer,
    IndexedSlices,
    LossScaleOptimizer,
    Variable,
    backends,
)
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device
from gpuopt.step.rule_updates import RuleUpdates

pytestmark = [pytest.mark.value, pytest.mark.gpu]

GPU = Device("gpu", 0)
NUM_STEPS = 3


def decays(step: Variable) -> Any:
    return gpuopt.exponential_decay(0.1, step, 3, 0.5)


# Makes an optimizer that follows a global step, and the type of its variables.
OPTIMIZERS: dict[str, tuple[Callable[[Variable], Any], Any]] = {
    # Of both hyperparameters, a Python float would keep all digits.
    "clipped AdamW": (
        lambda step: gpuopt.AdamWOptimizer(decays(step), decays(step), clip_norm=1.0),
        np.float32,
    ),
    "torch's AdamW": (lambda step: gpuopt.TorchAdamWOptimizer(decays(step)), np.float64),
    "LAMB": (lambda step: gpuopt.LAMBOptimizer(), np.float32),
    "masters and averages": (
        lambda step: gpuopt.LazyAdamOptimizer(
            0.1, masters="float32", averages=ExponentialMovingAverage(0.9, step)
        ),
        np.float16,
    ),
    "rounding": (lambda step: gpuopt.AdamOptimizer(0.1, stochastic_rounding=7), ml_dtypes.bfloat16),
}


class DecidedByTheHost(gpuopt.DynamicLossScale):
    """What a user's own manager may do is not known, and so the host decides."""

    def get_loss_scale(self) -> Any:
        return super().get_loss_scale()


class Side:
    """A model whose updates are decided about by the GPU or by the host."""

    def __init__(self, name: str, manager: type[gpuopt.DynamicLossScale]) -> None:
        make, self.dtype = OPTIMIZERS[name]
        self.variables = {
            each: Variable(np.full(shape, 0.5, self.dtype), name=each, device="gpu:0")
            for each, shape in {"w0": (3, 4), "w1": (700,), "table": (6, 4)}.items()
        }
        self.step = Variable(0, name="step", trainable=False)
        self.inner = make(self.step)
        self.scaling = LossScaleOptimizer(self.inner, manager(4.0, 2, 2.5))
        self.optimizer = GradientAccumulationOptimizer(self.scaling, NUM_STEPS)

    def call(self, rng: np.random.Generator, is_sparse: bool, is_bad: bool) -> None:
        """Makes a call with random gradients; one of them is not finite if it is bad."""
        xp: Any = pytest.importorskip("cupy")
        pairs: list[Any] = []
        bad = rng.choice([*self.variables])
        for name, variable in self.variables.items():
            values = rng.normal(size=variable.shape).astype(self.dtype)
            if is_bad and name == bad:
                values.reshape(-1)[rng.integers(values.size)] = rng.choice([np.inf, np.nan])
            rows = rng.integers(0, 6, 6)
            gradient = xp.asarray(values)
            if is_sparse and name == "table":
                gradient = IndexedSlices(gradient, xp.asarray(rows))
            pairs.append((gradient, variable))
        self.optimizer.apply_gradients(pairs, self.step)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: each.numpy() for name, each in self.variables.items()}
        state = self.optimizer.state_dict()
        for slot, by_name in state["slots"].items():
            # Names of variables differ between the sides.
            found.update(
                {
                    f"{slot} of {name}": by_name[each.name]
                    for name, each in self.variables.items()
                    if each.name in by_name
                }
            )
        averages = self.inner.averages
        for name, each in self.variables.items() if averages is not None else ():
            found[f"average of {name}"] = averages.of([each])[0].numpy()
        return {**found, **state["non_slots"], "step": self.step.numpy()}


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "mixed"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(3)
def test_an_overflow_in_any_call_leaves_out_its_update_as_on_the_host(
    name: str, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[RuleUpdates] = []
    decide = RuleUpdates.decide_on_gpu

    def note(self: RuleUpdates, *given: Any) -> None:
        decided.append(self)
        decide(self, *given)

    monkeypatch.setattr(RuleUpdates, "decide_on_gpu", note)
    # In the first, second and last call of an update, in all of them, and in none.
    bad_calls = {3, 10, 17, 24, 25, 26}
    states = []
    for manager in (gpuopt.DynamicLossScale, DecidedByTheHost):
        rng = np.random.default_rng(3)
        streams = [new_stream() for _ in range(2)]
        with driver.schedule("random", 3) if driver.is_here() else nullcontext():
            side = Side(name, manager)
            for call in range(12 * NUM_STEPS + 1):
                with streams[call % 2]:
                    side.call(rng, is_sparse, call in bad_calls)
            states.append(side.state())
        assert side.optimizer.accumulated_steps == 1
        assert (side.scaling.num_skipped, int(side.step)) == (4, 8)
    assert len(decided) >= 12 - 2  # the first ones make averages
    got, expected = states
    assert got.keys() == expected.keys()
    for each, value in expected.items():
        assert np.asarray(got[each]).tobytes() == np.asarray(value).tobytes(), each


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_call_is_a_launch_and_an_update_two_and_nobody_waits(name: str, waits: list[str]) -> None:
    launches = []
    with driver.schedule("oldest"), backends.using(GPU, cuda_backend(GPU)):
        side = Side(name, gpuopt.DynamicLossScale)
        rng = np.random.default_rng(0)
        for call in range(8 * NUM_STEPS):
            before, waited = driver.counts().get("launches", 0), len(waits)
            side.call(rng, is_sparse=False, is_bad=call % 7 == 6)
            launches.append(driver.counts()["launches"] - before)
            assert call < 2 * NUM_STEPS or len(waits) == waited, call
        assert side.optimizer.accumulated_steps == 0
        assert (side.scaling.num_skipped, int(side.step)) == (3, 5)
    # The last gradients are added as the sums are measured; LAMB also sums over its update.
    num_in_update = 3 if name == "LAMB" else 2
    assert launches[2 * NUM_STEPS :] == [1, 1, num_in_update] * 6


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
def test_gradients_of_a_scaled_loss_are_accumulated_and_nobody_waits(waits: list[str]) -> None:
    xp: Any = pytest.importorskip("cupy")
    with driver.schedule("oldest"), backends.using(GPU, cuda_backend(GPU)):
        side = Side("clipped AdamW", gpuopt.DynamicLossScale)
        w = side.variables["w1"]
        factors = [xp.full(w.shape, each, np.float32) for each in (1, np.inf)]
        for call in range(8 * NUM_STEPS):
            factor, waited = factors[call % 7 == 6], len(waits)
            side.optimizer.minimize(lambda f=factor: xp.sum(w.value() * f), side.step, [w])
            assert call < 2 * NUM_STEPS or len(waits) == waited, call
        assert (side.scaling.num_skipped, int(side.step)) == (3, 5)
