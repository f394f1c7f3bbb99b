"""Gradients of any float type as an option of optimizers: on every device, in all loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES
from each_device import variable_on

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends.backend import compute_type
from gpuopt.step.replica_context import replica_context

pytestmark = pytest.mark.value

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(), (5,), (0,), (3, 40), (200, 300)]
HEIGHT, WIDTH = 400, 24
MAKE: dict[str, Callable[..., Any]] = {
    "plain": lambda **common: gpuopt.AdamOptimizer(0.1, **common),
    "clip_norm": lambda **common: gpuopt.AdamOptimizer(0.1, clip_norm=0.5, **common),
    "rows": lambda **common: gpuopt.LazyAdamOptimizer(0.1, clip_value=0.5, **common),
    "catch_up": lambda **common: gpuopt.AdamOptimizer(0.1, catch_up=True, **common),
    "sums": lambda **common: gpuopt.LAMBOptimizer(0.1, **common),
    "accumulated": lambda **common: gpuopt.GradientAccumulationOptimizer(
        gpuopt.AdamOptimizer(0.1, **common), 2
    ),
    "scaled": lambda **common: gpuopt.LossScaleOptimizer(
        gpuopt.AdamOptimizer(0.1, **common), gpuopt.FixedLossScaleManager(8.0)
    ),
    "averages": lambda **common: gpuopt.AdamOptimizer(
        0.1, averages=gpuopt.ExponentialMovingAverage(0.5), **common
    ),
}


def drawn(step: int, types: list[np.dtype[Any]]) -> list[np.ndarray]:
    rng = np.random.default_rng([7, step])
    shapes = [*SHAPES, (30, WIDTH)]
    return [
        np.asarray(rng.normal(size=shape)).astype(types[number % len(types)])
        for number, shape in enumerate(shapes)
    ]


def rows(step: int) -> np.ndarray:
    return np.random.default_rng([8, step]).integers(0, HEIGHT, 30)


def trained(
    xp: Any, make: Callable[..., Any], dtype: Any, types: list[Any], *, cast_before: bool
) -> list[np.ndarray]:
    """Makes steps; returns variables and slots. Gradients are cast before them, or in them."""
    rng = np.random.default_rng(3)
    variables = [
        variable_on(xp, np.asarray(rng.normal(size=shape)).astype(dtype), name=f"w{number}")
        for number, shape in enumerate([*SHAPES, (HEIGHT, WIDTH)])
    ]
    optimizer = make(gradient_dtype="cast")
    for step in range(4):
        gradients: list[Any] = drawn(step, types)
        if cast_before:
            gradients = [each.astype(compute_type(np.dtype(dtype))) for each in gradients]
        gradients = [xp.asarray(each) for each in gradients]
        gradients[-1] = IndexedSlices(gradients[-1], xp.asarray(rows(step)))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    owned = [*variables, *optimizer.owner_of_state.variables()]
    return [each.numpy().astype(np.float64) for each in owned]


MIXED = [np.dtype("f4"), np.dtype("f8"), np.dtype("f2"), BFLOAT16]
TYPES = [[each] for each in DTYPES] + [MIXED]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(t.name for t in types))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_read_as_numbers_that_steps_compute_with(
    xp: Any, dtype: Any, types: list[Any], kind: str
) -> None:
    made, expected = (trained(xp, MAKE[kind], dtype, types, cast_before=b) for b in (False, True))
    # On GPUs, the order of sums depends on the widest type.
    is_summed = xp is not np and kind in ("sums", "clip_norm")
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps) if is_summed else 0.0
    assert len(made) == len(expected)
    for got, wanted in zip(made, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance / 1e3)


@pytest.mark.usefixtures("every_form_one_by_one")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_form_of_a_rule_reads_them(dtype: Any) -> None:
    for kind in ("plain", "rows", "catch_up"):
        made, expected = (
            trained(np, MAKE[kind], dtype, MIXED, cast_before=before) for before in (False, True)
        )
        for got, wanted in zip(made, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.filterwarnings("error")
def test_what_the_type_of_a_step_cannot_hold_is_infinite(xp: Any) -> None:
    large = xp.asarray(np.full(3, 1e300))
    w, wide = variable_on(xp, np.ones(3, np.float32)), variable_on(xp, np.ones(3))
    skipping = gpuopt.GradientDescentOptimizer(0.5, gradient_dtype="cast", on_nonfinite="raise")
    with pytest.raises(FloatingPointError):  # noqa: PT012
        skipping.apply_gradients([(large, w)])
        skipping.check()
    np.testing.assert_array_equal(w.numpy(), np.ones(3))
    skipping.apply_gradients([(large, wide)])
    np.testing.assert_array_equal(wide.numpy(), np.full(3, -5e299))
    clipping = gpuopt.GradientDescentOptimizer(
        0.5, gradient_dtype="cast", clip_norm=1.0, clip_form="torch"
    )
    clipping.apply_gradients([(large, w)])  # 0 times infinity
    assert np.isnan(w.numpy()).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("option", ["cast", "strict"])
def test_numbers_without_a_type_that_are_too_large_are_infinite(option: Any) -> None:
    w = Variable(np.ones(2, np.float32))
    gradient: Any = [1.0, 4e300]
    gpuopt.GradientDescentOptimizer(1.0, gradient_dtype=option).apply_gradients([(gradient, w)])
    np.testing.assert_array_equal(w.numpy(), [0, -np.inf])


@pytest.mark.parametrize("kind", [np.int32, np.bool_, np.complex64])
def test_what_is_no_float_is_refused_as_before(kind: Any) -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer(gradient_dtype="cast")
    gradient: Any
    for gradient in (np.ones(2, kind), IndexedSlices(np.ones(1, kind), [0])):
        with pytest.raises(TypeError, match=r'"w" has dtype .*gradient_dtype="cast" is for'):
            optimizer.apply_gradients([(gradient, w)])
    np.testing.assert_array_equal(w.numpy(), [1, 1])


def test_what_is_no_variable_is_refused_as_before() -> None:
    given: Any = [(np.ones(2), "w")]
    with pytest.raises(TypeError, match="expected a Variable or an array, got str"):
        gpuopt.AdamOptimizer(gradient_dtype="cast").apply_gradients(given)


def test_strict_steps_name_the_option() -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    with pytest.raises(TypeError, match='pass gradient_dtype="cast" to the optimizer'):
        gpuopt.AdamOptimizer().apply_gradients([(np.ones(2), w)])
    with pytest.raises(ValueError, match='gradient_dtype must be "strict" or "cast", got \'x\''):
        gpuopt.AdamOptimizer(gradient_dtype="x")  # type: ignore[arg-type]


class Halving(gpuopt.GradientDescentOptimizer):
    def _apply_dense(self, grad: Any, var: Variable) -> None:
        assert grad.dtype == var.dtype
        var.assign_sub(0.5 * grad)


def test_a_hook_gets_gradients_of_its_variables_type() -> None:
    w = Variable(np.ones(2, np.float32))
    Halving(0.1, gradient_dtype="cast").apply_gradients([(np.ones(2), w)])
    np.testing.assert_array_equal(w.numpy(), [0.5, 0.5])


@pytest.mark.parametrize("kind", ["replicas", "workers"])
def test_replicas_and_workers_may_have_gradients_of_several_types(kind: str) -> None:
    given = [np.float64([1.5, 2**-30]), np.float16([0.25, 2**-20])]
    expected = 1 - sum(each.astype(np.float32) for each in given) * np.float32(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(0.5, gradient_dtype="cast")
    if kind == "replicas":
        strategy = gpuopt.distributed.MirroredStrategy(["cpu"] * 2)
        w = strategy.variable(np.ones(2, np.float32), name="w")

        def step() -> None:
            rank = replica_context().replica_id
            optimizer.apply_gradients([(given[rank], w)])

        strategy.run(step)
        for copy in w.replicas:
            np.testing.assert_array_equal(copy.numpy(), expected)
        return
    w, step_count = Variable(np.ones(2, np.float32)), Variable(np.int64(0), trainable=False)
    sync = gpuopt.distributed.SyncReplicasOptimizer(optimizer, 2, 2)

    def train(worker: Any) -> None:
        worker.apply_gradients([(given[worker.index], w)], step_count)

    sync.run(train, step_count)
    mean = (given[0].astype(np.float32) + given[1].astype(np.float32)) / np.float32(2)
    np.testing.assert_allclose(w.numpy(), 1 - np.float32(0.5) * mean, rtol=1e-6)
