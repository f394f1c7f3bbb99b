"""NaN and infinity in gradients do what `on_nonfinite` says."""

from __future__ import annotations

import functools
import inspect
from contextlib import nullcontext
from typing import Any

import autograd.numpy as anp
import fake_cupy
import numpy as np
import pytest
from dtypes import every_dtype
from every_optimizer import make, optimizer_classes

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import to_device

pytestmark = pytest.mark.contract

BAD = [np.nan, np.inf, -np.inf]


def snapshot(optimizer: gpuopt.Optimizer, *variables: Variable) -> list[bytes]:
    return [v.numpy().tobytes() for v in (*variables, *optimizer.variables())]


# The check comes before any rule: without slots, with them, and of more scalars.
@pytest.mark.parametrize(
    "name",
    ["GradientDescentOptimizer", "AdamOptimizer", "AdagradDAOptimizer", "ScheduleFreeSGDOptimizer"],
)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_bad_gradient_of_one_variable_leaves_everything_as_it_was(
    name: str, sparse: bool, policy: str, caplog: Any
) -> None:
    good = Variable(np.ones(3, np.float32), name="good")
    bad = Variable(np.ones((4, 2), np.float32), name="bad")
    step = Variable(0, name="global_step", dtype=np.int64)
    optimizer = make(name, on_nonfinite=policy)
    fine = [(np.ones(3, np.float32), good), (np.ones((4, 2), np.float32), bad)]
    optimizer.apply_gradients(fine, global_step=step)
    before = snapshot(optimizer, good, bad, step)
    assert not np.array_equal(good.numpy(), np.ones(3)), "the fine step did nothing"
    for value in BAD:
        gradient = np.ones((4, 2), np.float32)
        gradient[2, 1] = value
        given = IndexedSlices(gradient[2:3], [1]) if sparse else gradient
        pairs = [(np.ones(3, np.float32), good), (given, bad)]
        if policy == "raise":
            with pytest.raises(FloatingPointError, match='gradient for "bad" is not finite: 1 of'):
                optimizer.apply_gradients(pairs, global_step=step)
        else:
            caplog.clear()
            optimizer.apply_gradients(pairs, global_step=step)
            assert 'gradient for "bad" is not finite' in caplog.text
        assert snapshot(optimizer, good, bad, step) == before
    optimizer.apply_gradients(fine, global_step=step)
    assert int(step) == 2


@every_dtype
def test_the_first_value_that_is_not_finite_is_named(dtype: Any) -> None:
    w = Variable(np.ones((2, 3), dtype), name="w")
    gradient = np.ones((2, 3), dtype)
    gradient[1, 0], gradient[1, 2] = np.inf, np.nan
    optimizer = gpuopt.GradientDescentOptimizer(0.1, on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"2 of 6 values, the first is inf at \[1, 0\]"):
        optimizer.apply_gradients([(gradient, w)])
    scalar = Variable(np.ones((), dtype), name="s")
    with pytest.raises(FloatingPointError, match=r"1 of 1 values, the first is nan at \[\]"):
        optimizer.apply_gradients([(np.array(np.nan, dtype), scalar)])
    optimizer.apply_gradients([(np.zeros((0,), dtype), Variable(np.zeros(0, dtype)))])


def test_by_default_nan_and_infinity_propagate_as_in_tensorflow() -> None:
    w = Variable([1.0, 2.0], name="w")
    gpuopt.GradientDescentOptimizer(0.5).apply_gradients([([np.nan, 1.0], w)])
    np.testing.assert_array_equal(w, np.float32([np.nan, 1.5]))


def test_every_optimizer_takes_on_nonfinite_and_refuses_other_values() -> None:
    for name, cls in optimizer_classes().items():
        parameter = inspect.signature(cls).parameters["on_nonfinite"]
        assert parameter.default == "propagate", name
        with pytest.raises(ValueError, match="on_nonfinite must be one of"):
            make(name, on_nonfinite="ignore")


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_minimize_checks_all_gradients_before_it_applies_one(policy: str) -> None:
    good, bad = Variable([1.0], name="good"), Variable([0.0], name="bad")
    optimizer = gpuopt.GradientDescentOptimizer(0.1, on_nonfinite=policy)

    def loss() -> Any:
        return anp.sum(good.value() * 2.0) + anp.sum(1.0 / bad.value())

    def minimize() -> None:
        raised = policy == "raise"
        expected = pytest.raises(FloatingPointError, match='"bad"') if raised else nullcontext()
        with np.errstate(all="ignore"), expected:
            optimizer.minimize(loss, gate_gradients=gpuopt.Optimizer.GATE_NONE)

    with pytest.warns(UserWarning, match="GATE_NONE gives way"):
        minimize()
    np.testing.assert_array_equal(good, [1.0])


def test_an_override_that_wraps_the_method_is_called_with_all_gradients() -> None:
    class Doubling(gpuopt.GradientDescentOptimizer):
        @functools.wraps(gpuopt.GradientDescentOptimizer.apply_gradients)
        def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **more: Any) -> None:
            doubled = [(2 * gradient, variable) for gradient, variable in grads_and_vars]
            super().apply_gradients(doubled, *arguments, **more)

    weight, optimizer = Variable([1.0]), Doubling(1.0)
    with pytest.warns(UserWarning, match="Doubling overrides apply_gradients"):
        optimizer.minimize(lambda: anp.sum(weight), gate_gradients=gpuopt.Optimizer.GATE_NONE)
    assert weight.numpy().tolist() == [-1]


@pytest.mark.emulator
def test_where_the_host_decides_it_waits_once_for_each_gpu_unless_a_gradient_is_bad(
    emulated_gpus: list[Any],
) -> None:
    variables = [
        Variable(np.ones((4, 3), dtype), name=f"w{i}", device=f"gpu:{i % 2}")
        for i, dtype in enumerate([np.float32, np.float64] * 4)
    ]
    gradients = [to_device(np.ones((4, 3), v.dtype), v.device) for v in variables]
    optimizer = gpuopt.GradientDescentOptimizer(lambda: 0.5, on_nonfinite="raise")
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    before = fake_cupy.counts.synchronisations
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    assert fake_cupy.counts.synchronisations - before == 2


def test_equal_rows_are_added_up_for_hooks_too() -> None:
    class Own(gpuopt.Optimizer):
        def _apply_sparse(self, grad: Any, var: Variable) -> None:
            raise AssertionError("it is not finite")

    table = Variable(np.zeros((3, 1), np.float32), name="table")
    slices = IndexedSlices(np.float32([[3e38], [1], [3e38]]), np.array([1, 2, 1]))
    Own(False, "Own", on_nonfinite="skip").apply_gradients([(slices, table)])


def test_numbers_whose_squares_are_infinite_are_finite() -> None:
    v, w = Variable(np.zeros(2, np.float32), name="v"), Variable(np.zeros(2, np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="raise")
    optimizer.apply_gradients([(np.float32([1e30, 1]), v), (np.float32([1, 2]), w)])
    assert v.numpy()[0] == np.float32(-1e30)
    with pytest.raises(FloatingPointError, match='gradient for "w" is not finite: 1 of 2'):
        optimizer.apply_gradients([(np.float32([1e30, 1]), v), (np.float32([1, np.nan]), w)])
