"""MultitaskOptimizerWrapper and clip_gradients_by_global_norm."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from golden_cases import error, read_json

import gpuopt
from gpuopt import IndexedSlices, MultitaskOptimizerWrapper, Variable
from gpuopt.backends import to_device

ZEROS, ONES = np.zeros(2, np.float32), np.ones(2, np.float32)


def rows(values: Any, indices: list[int]) -> IndexedSlices:
    return IndexedSlices(np.float32(values).reshape(-1, 2), np.array(indices, np.int64))


def momentum() -> gpuopt.Optimizer:
    return gpuopt.MomentumOptimizer(1.0, 0.5)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="must be an Optimizer, got <class"):
        MultitaskOptimizerWrapper(gpuopt.AdamOptimizer)


WRAPPED: dict[str, Any] = {
    "skip": lambda: MultitaskOptimizerWrapper(
        gpuopt.MomentumOptimizer(1.0, 0.5, clip_norm=1.0, on_nonfinite="skip")
    ),
    "raise": lambda: MultitaskOptimizerWrapper(
        gpuopt.MomentumOptimizer(1.0, 0.5, clip_norm=1.0, on_nonfinite="raise")
    ),
    "no norm": lambda: MultitaskOptimizerWrapper(
        gpuopt.MomentumOptimizer(1.0, 0.5, on_nonfinite="skip")
    ),
    "scaled": lambda: gpuopt.LossScaleOptimizer(
        MultitaskOptimizerWrapper(gpuopt.MomentumOptimizer(1.0, 0.5, clip_norm=1.0)),
        gpuopt.FixedLossScaleManager(2.0),
    ),
    "around scaled": lambda: MultitaskOptimizerWrapper(
        gpuopt.LossScaleOptimizer(
            gpuopt.MomentumOptimizer(1.0, 0.5, clip_norm=1.0), gpuopt.FixedLossScaleManager(2.0)
        )
    ),
    "around scaled, no norm": lambda: MultitaskOptimizerWrapper(
        gpuopt.LossScaleOptimizer(
            gpuopt.MomentumOptimizer(1.0, 0.5), gpuopt.FixedLossScaleManager(2.0)
        )
    ),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("kind", "others"), [(kind, ("zero", "ones")[at % 2]) for at, kind in enumerate(WRAPPED)]
)
def test_an_infinite_norm_of_finite_gradients_is_no_step(
    kind: str, others: str, device: str
) -> None:
    a, b = (Variable(np.zeros(2, np.float32), name=name, device=device) for name in "ab")
    step = Variable(0, name="step")
    optimizer = WRAPPED[kind]()

    def make_step(gradient: Any) -> None:
        given = [ZEROS if others == "zero" else ONES, np.float32(gradient)]
        where = gpuopt.device.device_of(b.storage)
        pairs = [(to_device(each, where), v) for each, v in zip(given, (a, b), strict=True)]
        optimizer.apply_gradients(pairs, step)

    make_step([3, 4])
    before = [each.numpy().tolist() for each in (a, b)]
    for bad in ([3e20, 4e20], [np.nan, 1], [1, np.inf]):
        if "no norm" in kind and np.isfinite(bad).all():
            continue
        with pytest.raises(FloatingPointError) if kind == "raise" else nullcontext():
            make_step(bad)
        assert [each.numpy().tolist() for each in (a, b)] == before
    told = str(optimizer.last_nonfinite)
    assert 'gradient for "b" is not finite' in told
    assert int(step) == 1
    make_step([3, 4])
    assert int(step) == 2
    assert (a.numpy() == 0).all() == (others == "zero")


def test_the_step_counts_and_finishes_if_all_gradients_are_zero() -> None:
    w, step = Variable([1.0, 1.0], name="w"), Variable(0, name="step")
    optimizer = MultitaskOptimizerWrapper(gpuopt.AdamOptimizer(0.1, beta1=np.float32(0.5)))
    optimizer.apply_gradients([(ZEROS, w)], global_step=step)
    assert w.numpy().tolist() == [1, 1]
    assert optimizer.get_slot(w, "m").numpy().tolist() == [0, 0]  # made, as in TensorFlow
    own = {variable.name: variable for variable in optimizer.variables()}
    assert float(own["beta1_power"]) == 0.25
    assert int(step) == 1


@every_dtype
def test_one_number_that_is_not_zero_is_enough(dtype: Any) -> None:
    w = Variable(np.ones(1000, dtype), name="w")
    for value in (np.nan, -1.0, np.inf, ml_dtypes.finfo(dtype).smallest_subnormal):
        gradient = np.zeros(1000, dtype)
        gradient[999] = value
        optimizer = MultitaskOptimizerWrapper(momentum())
        optimizer.apply_gradients([(gradient, w)])
        slot = optimizer.get_slot(w, "momentum").numpy()
        np.testing.assert_array_equal(slot.astype(np.float64), gradient.astype(np.float64))


@pytest.mark.parametrize(
    "gradient",
    [
        lambda: rows([], []),
        lambda: rows([[0, 0], [-0.0, 0]], [1, 1]),
        lambda: Variable(np.zeros((3, 2), np.float32), trainable=False),
        lambda: [[0.0, 0.0]] * 3,
    ],
    ids=["no rows", "zero rows", "a Variable", "lists"],
)
def test_gradients_of_all_kinds_may_be_zero(gradient: Any) -> None:
    w = Variable(np.ones((3, 2), np.float32), name="w")
    optimizer = MultitaskOptimizerWrapper(gpuopt.AdamOptimizer(0.1))
    optimizer.apply_gradients([(rows([[1, 1]], [0]), w)])
    before = [w.numpy(), *(optimizer.get_slot(w, name).numpy() for name in ("m", "v"))]
    optimizer.apply_gradients([(gradient(), w)])
    after = [w.numpy(), *(optimizer.get_slot(w, name).numpy() for name in ("m", "v"))]
    np.testing.assert_array_equal(before, after)


def test_bad_input_of_a_variable_that_would_stay_is_refused() -> None:
    a, b = Variable([0.0, 0.0], name="a"), Variable(np.ones((3, 2), np.float32), name="b")
    optimizer = MultitaskOptimizerWrapper(momentum())
    with pytest.raises(IndexError, match=r'gradient for "b": indices\[0\] = 5'):
        optimizer.apply_gradients([(ONES, a), (rows([[0, 0]], [5]), b)])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, a)])
    assert a.numpy().tolist() == [0, 0]
    assert optimizer.get_slot_names() == []


def test_gradients_are_not_applied_one_by_one() -> None:
    w = Variable([1.0, 1.0], name="w")
    optimizer = MultitaskOptimizerWrapper(momentum())
    with pytest.warns(UserWarning, match="GATE_NONE gives way to GATE_OP"):
        optimizer.minimize(lambda: (w * 0).sum(), var_list=[w], gate_gradients=0)
    assert w.numpy().tolist() == [1, 1]


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_the_host_waits_once_for_all_gpus() -> None:
    places = [f"gpu:{i % 2}" for i in range(20)] + ["cpu"]
    variables = [Variable(np.ones(4, np.float32), device=place) for place in places]
    gradients = [
        Variable(np.full(4, i % 3, np.float32), device=place).storage
        for i, place in enumerate(places)
    ]
    optimizer = MultitaskOptimizerWrapper(momentum())
    pairs = list(zip(gradients, variables, strict=True))
    optimizer.apply_gradients(pairs)
    before = fake_cupy.counts.synchronisations
    optimizer.apply_gradients(pairs)
    assert fake_cupy.counts.synchronisations - before == 1
    for i, variable in enumerate(variables):
        np.testing.assert_allclose(variable.numpy(), 1 - 2.5 * (i % 3), rtol=1e-6)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_a_gpu_refuses_rows_of_a_variable_that_would_stay() -> None:
    a = Variable(np.zeros(2, np.float32), name="a", device="gpu:0")
    b = Variable(np.ones((3, 2), np.float32), name="b", device="gpu:0")
    step = Variable(0, name="step")
    values, indices = Variable(np.zeros((1, 2), np.float32), device="gpu:0"), [5]
    there = Variable(indices, dtype=np.int64, device="gpu:0").storage
    optimizer = MultitaskOptimizerWrapper(momentum())
    optimizer.apply_gradients([(ONES, a), (IndexedSlices(values.storage, there), b)], step)
    with pytest.raises(IndexError, match=r'gradient for "b": row 5 is not in \[0, 3\)'):
        optimizer.check()
    assert a.numpy().tolist() == [0, 0]
    assert int(step) == 0


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("num_rows", [1, 3000])
def test_averages_wait_for_the_check_of_rows_of_a_variable_that_would_stay(num_rows: int) -> None:
    b = Variable(np.ones((3, 2), np.float32), name="b", device="gpu:0")
    average_of = gpuopt.MovingAverageOptimizer(MultitaskOptimizerWrapper(momentum()), 0.5)
    values = Variable(np.zeros((num_rows, 2), np.float32), device="gpu:0").storage
    good, bad = (
        Variable(np.full(num_rows, row), dtype=np.int64, device="gpu:0").storage for row in (2, 5)
    )
    average_of.apply_gradients([(IndexedSlices(values, good), b)])
    b.assign(np.zeros((3, 2), np.float32))
    average_of.apply_gradients([(IndexedSlices(values, bad), b)])
    with pytest.raises(IndexError, match=r'gradient for "b": row 5 is not in \[0, 3\)'):
        average_of.check()
    average = average_of.averages.average(b)
    assert average is not None
    assert np.array_equal(average.numpy(), np.ones((3, 2)))


# clip_gradients_by_global_norm


def clipping_cases() -> list[Any]:
    cases = read_json("schedules_and_clipping.json")["clipping"]
    return [case for case in cases if case["function"] == "clip_by_global_norm"]


def as_gradient(given: Any) -> Any:
    if isinstance(given, dict):
        return IndexedSlices(np.float32(given["values"]), given["indices"], given["shape"])
    return None if given is None else np.float32(given)


def test_gradients_are_clipped_as_tensorflow_clips_them() -> None:
    assert clipping_cases()
    for case in clipping_cases():
        check_clipping(case)


def check_clipping(case: Any) -> None:
    pairs = []
    for given in case["tensors"]:
        gradient = as_gradient(given)
        shape = () if gradient is None else getattr(gradient, "dense_shape", None) or gradient.shape
        pairs.append((gradient, Variable(np.zeros(shape, np.float32))))
    zero = (np.zeros(3, np.float32), Variable(np.zeros(3, np.float32)))
    clipped, norm = gpuopt.clip_gradients_by_global_norm([*pairs, zero], case["clip_norm"])
    assert error(norm, case["norm"]) <= 3e-6
    assert norm.dtype == np.float32
    assert [variable for _, variable in clipped[:-1]] == [variable for _, variable in pairs]
    for (got, _), given in zip(clipped, case["clipped"], strict=False):
        expected = as_gradient(given)
        if isinstance(expected, IndexedSlices):
            np.testing.assert_array_equal(got.indices, expected.indices)
            got, expected = got.values, expected.values
        assert (got is None) == (expected is None)
        if got is not None:
            assert got.dtype == np.float32
            assert error(got, expected) <= 3e-6
    if np.isfinite(norm):
        assert clipped[-1][0].tolist() == [0, 0, 0]


def test_small_gradients_stay_as_they_are_and_the_default_norm_is_20() -> None:
    w = np.zeros(3, np.float32)
    gradient = np.float32([0.1, 0.3, 0.7])
    [(small, variable)], norm = gpuopt.clip_gradients_by_global_norm([(gradient, w)])
    assert variable is w
    np.testing.assert_array_equal(small, gradient)
    assert float(norm) == pytest.approx(np.linalg.norm(gradient))
    [(large, _)], _ = gpuopt.clip_gradients_by_global_norm(iter([(gradient * 1000, w)]))
    assert np.linalg.norm(large) == pytest.approx(20)
    assert gpuopt.clip_gradients_by_global_norm([(None, w)]) == ([(None, w)], 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ([[(ONES, ZEROS)], 0.0], ValueError, "clip_norm must be above 0 and finite, got 0.0"),
        ([[(ONES, ZEROS)], np.nan], ValueError, "clip_norm must be above 0 and finite, got nan"),
        ([[(ONES, ZEROS)], "1"], TypeError, "clip_norm must be a number, got '1'"),
        ([[(np.ones(3, np.float32), ZEROS)]], ValueError, r"has shape \(3,\)"),
        ([[(np.ones(2), ZEROS)]], TypeError, "has dtype float64; the variable has dtype float32"),
        ([[]], ValueError, "No variables provided"),
        ([[ONES, 1, 2]], ValueError, r"grads_and_vars\[1\] must be a|dtype|pair"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises((kind, TypeError), match=message):
        gpuopt.clip_gradients_by_global_norm(*arguments)


@every_dtype
def test_gradients_keep_their_dtype(dtype: Any) -> None:
    w = Variable(np.zeros(100, dtype))
    [(clipped, _)], norm = gpuopt.clip_gradients_by_global_norm([(np.full(100, 300, dtype), w)], 1)
    assert clipped.dtype == dtype
    assert norm.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert float(norm) == pytest.approx(3000, rel=1e-2)
    np.testing.assert_allclose(clipped.astype(np.float64), 0.1, rtol=1e-2)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_gradients_of_several_devices_have_one_norm() -> None:
    pairs = []
    for place in ("cpu", "gpu:1", "gpu:0", "gpu:1"):
        gradient = Variable(np.full(4, 5, np.float32), device=place).storage
        pairs.append((gradient, Variable(np.zeros(4, np.float32), device=place)))
    clipped, norm = gpuopt.clip_gradients_by_global_norm(pairs, 2.0)
    assert float(norm) == 20
    for (gradient, variable), place in zip(
        clipped, ("cpu", "gpu:1", "gpu:0", "gpu:1"), strict=True
    ):
        assert str(variable.device) == place
        variable.assign(gradient)
        np.testing.assert_array_equal(variable.numpy(), np.full(4, 0.5))
    before = fake_cupy.counts.synchronisations
    gpuopt.clip_gradients_by_global_norm(pairs[1:], 2.0)
    assert fake_cupy.counts.synchronisations == before
