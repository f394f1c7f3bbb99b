"""A step with a scaled loss is made, or skipped, on each kind of device alike."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from each_device import variable_on

import gpuopt
from gpuopt import IndexedSlices, LossScaleOptimizer, Variable

pytestmark = pytest.mark.value

CLIPPING: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.5},
}


class _Own(gpuopt.ExponentialUpdateLossScaleManager):
    """Has the host decide."""

    def get_loss_scale(self) -> Any:
        return super().get_loss_scale()


MANAGERS = {"known": gpuopt.ExponentialUpdateLossScaleManager, "own": _Own}


def numbers(variable: Any) -> np.ndarray:
    return np.asarray(variable.numpy()).astype(np.float64)


def states_after(xp: Any, cls: Any, dtype: Any, kind: str, scales: bool) -> list[np.ndarray]:
    """Makes steps, some of which overflow; returns all variables and slots.

    Args:
        xp: Says where.
        cls: Makes the optimizer.
        dtype: Of variables and gradients.
        kind: Which gradients there are.
        scales: Whether to scale; else steps that overflow are left out by hand.
    """
    rng = np.random.default_rng(11)
    shapes = [(3, 4), (70, 5), ()]
    variables = [
        variable_on(xp, np.asarray(rng.normal(size=s)).astype(dtype), name=f"w{i}")
        for i, s in enumerate(shapes)
    ]
    table = variable_on(xp, rng.normal(size=(40, 12)).astype(dtype), name="table")
    step = Variable(0, name="step")
    optimizer = cls()
    scaling = LossScaleOptimizer(
        optimizer, gpuopt.ExponentialUpdateLossScaleManager(8, 2, 1, 2.0, 0.5)
    )
    for number in range(6):
        is_bad = number in (1, 4)
        scale = np.float64(scaling.loss_scale) if scales else 1.0
        dense = [np.asarray(rng.normal(size=s)) for s in shapes]
        values, rows = rng.normal(size=(30, 12)), rng.integers(0, 40, 30)
        if is_bad:
            (values if kind == "sparse" else dense[1])[-1, 2] = np.inf if number == 1 else np.nan

        def given(array: Any) -> Any:
            # Powers of 2: 16 bits round the products alike.
            return xp.asarray((np.asarray(array).astype(dtype) * dtype.type(scale)).astype(dtype))  # noqa: B023

        pairs: list[Any] = []
        if kind != "sparse":
            pairs += [(given(g), v) for g, v in zip(dense, variables, strict=True)]
        if kind != "dense":
            pairs.append((IndexedSlices(given(values), xp.asarray(rows)), table))
        if scales:
            scaling.apply_gradients(pairs, step, loss_scale=scale)
        elif not is_bad:
            optimizer.apply_gradients(pairs, step)
    assert int(step) == 4
    assert scaling.num_skipped == (2 if scales else 0)
    written = [*variables, table]
    slots = [optimizer.get_slot(v, n) for v in written for n in optimizer.get_slot_names()]
    return [numbers(each) for each in [*written, *slots] if each is not None]


@every_dtype
@pytest.mark.parametrize("kind", ["dense", "sparse", "mixed"])
@pytest.mark.one_in(3)
def test_every_type_can_be_scaled(dtype: Any, kind: str, xp: Any) -> None:
    dtype = np.dtype(dtype)
    got, expected = (
        states_after(xp, lambda: gpuopt.AdamOptimizer(clip_norm=1.0), dtype, kind, scales)
        for scales in (True, False)
    )
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("clip", ["plain", "clip_norm"])
@pytest.mark.parametrize("manager", MANAGERS)
def test_rows_that_add_up_to_infinity_are_left_out(manager: str, clip: str, xp: Any) -> None:
    kind = MANAGERS[manager]
    table = variable_on(xp, np.ones((3, 2), np.float32), name="table")
    inner = gpuopt.MomentumOptimizer(0.5, 0.5, **CLIPPING[clip])
    scaling = LossScaleOptimizer(inner, kind(8.0, 1000, 1))
    for large in (3e38, 1.0):
        values = np.float32([[large, 0], [1, 0], [large, 0]])
        slices = IndexedSlices(xp.asarray(values), xp.asarray(np.array([1, 2, 1])))
        scaling.apply_gradients([(slices, table)])
        assert scaling.num_skipped == 1
        assert scaling.loss_scale == np.float32(8 * 0.8)
        assert (numbers(table)[1:, 0] != 1).all() == (large == 1)
        assert (numbers(table) == 1).all() == (large != 1)
        assert np.isfinite(numbers(table)).all()
    expected = 'equal rows of the gradient for "table" add up to what is not finite'
    if xp is not np and manager == "known":
        more = "or equal rows of it add up to what is not"
        expected = f'gradient for "table" is not finite, {more}'
    assert scaling.last_nonfinite == expected


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_first_step_that_is_left_out_makes_the_slots(manager: str, xp: Any) -> None:
    w = variable_on(xp, np.ones(2, np.float32), name="w")
    inner = gpuopt.AdagradOptimizer(0.5, 0.25)
    scaling = LossScaleOptimizer(inner, MANAGERS[manager](8.0, 1000, 1))
    scaling.apply_gradients([(xp.asarray(np.float32([np.nan, 1])), w)])
    assert scaling.num_skipped == 1
    slot = inner.get_slot(w, "accumulator")
    assert slot is not None
    assert numbers(slot).tolist() == [0.25, 0.25]
    scaling.apply_gradients([(xp.asarray(np.float32([2, 0])), w)])
    assert numbers(slot).tolist() == [4.25, 0.25]


@pytest.mark.gpu
def test_a_loss_on_a_gpu_is_scaled_there() -> None:
    xp = pytest.importorskip("cupy")
    w = variable_on(xp, np.float32([1, 2]), name="w")
    manager = gpuopt.FixedLossScaleManager(1024.0)
    optimizer = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(0.5), manager)
    for bad in (1.0, np.inf):
        optimizer.minimize(lambda: xp.sum(w.value() * np.float32(bad)), var_list=[w])  # noqa: B023
    assert numbers(w).tolist() == [0.5, 1.5]
    assert optimizer.num_skipped == 1
    [(gradient, _)] = optimizer.compute_gradients(lambda: xp.sum(w.value() * 3), [w])
    assert numbers(Variable(gradient)).tolist() == [3, 3]
