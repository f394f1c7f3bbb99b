"""VariableClippingOptimizer, where the golden cases and the compositions do not cover it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from other_thread import repeated
from safetensors.numpy import load_file

import gpuopt
from gpuopt import IndexedSlices, Variable, VariableClippingOptimizer

pytestmark = pytest.mark.value


def sgd() -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def table(**options: Any) -> Variable:
    return Variable(np.full((3, 4), 2, np.float32), name="table", **options)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"opt": None}, TypeError, "must be an Optimizer, got None"),
        ({"vars_to_clip_dims": ["table"]}, TypeError, "must map variables to lists of dimensions"),
        ({"vars_to_clip_dims": {"table": [0]}}, TypeError, "holds str, not a Variable"),
        ({"dims": 1}, TypeError, '"table" must be a list of dimensions, got 1'),
        ({"dims": [1.0]}, TypeError, '"table" must be a list of dimensions'),
        ({"dims": [2]}, ValueError, r'"table" are \[2\]; the variable has shape \(3, 4\)'),
        ({"dims": [1, -1]}, ValueError, r'"table" are \[1, -1\], which names a dimension twice'),
        ({"max_norm": "2"}, TypeError, "max_norm must be a number, got '2'"),
        ({"max_norm": 0}, ValueError, "max_norm must be above 0 and finite"),
        ({"max_norm": float("nan")}, ValueError, "max_norm must be above 0 and finite"),
        ({"max_norm": 1e-60}, ValueError, "in the variables' types, got 1e-60"),
        ({"max_norm": 1e60}, ValueError, "in the variables' types, got 1e.60"),
        ({"name": ""}, ValueError, "Must specify the optimizer name"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"opt": sgd(), "max_norm": 2.0}
    arguments["vars_to_clip_dims"] = {table(): change.pop("dims", [1])}
    with pytest.raises(kind, match=message):
        VariableClippingOptimizer(**{**arguments, **change})


def clip_by_norm(w: np.ndarray, dims: Any, max_norm: float) -> np.ndarray:
    """As TensorFlow documents it."""
    norms = np.sqrt((w**2).sum(axis=tuple(dims), keepdims=True))
    return w * max_norm / np.maximum(norms, max_norm)


@every_dtype
def test_norms_are_taken_over_any_dimensions(dtype: Any) -> None:
    start = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(dtype)
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
    every: list[list[int]] = [[], [0], [1], [-1], [0, 2], [2, 1, 0]]
    for dims in every:
        w = Variable(start, name="w")
        optimizer = VariableClippingOptimizer(sgd(), {w: dims}, 0.7)
        optimizer.apply_gradients([(np.zeros((3, 4, 5), dtype), w)])
        expected = start.astype(np.float64)
        expected = clip_by_norm(expected, dims, 0.7) if dims else np.clip(expected, -0.7, 0.7)
        assert w.dtype == dtype
        np.testing.assert_allclose(
            w.numpy().astype(np.float64), expected, rtol=tolerance, err_msg=str(dims)
        )


def test_what_is_below_the_norm_keeps_its_bits() -> None:
    rng = np.random.default_rng(1)
    start = rng.normal(size=(50, 3)).astype(np.float32) / 10
    w = Variable(start)
    VariableClippingOptimizer(sgd(), {w: [1]}, 0.9).apply_gradients([(np.zeros_like(start), w)])
    np.testing.assert_array_equal(w.numpy(), start)


def test_nan_and_infinity_spread_over_their_slice_without_a_warning() -> None:
    w = Variable(np.float32([[1, np.nan], [np.inf, 1], [3, 4], [0, 0]]))
    optimizer = VariableClippingOptimizer(sgd(), {w: [1]}, 1.0)
    optimizer.apply_gradients([(np.zeros((4, 2), np.float32), w)])
    expected = [[np.nan, np.nan], [np.nan, 0], [0.6, 0.8], [0, 0]]
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-6)


def test_slots_and_variables_without_a_gradient_are_not_clipped() -> None:
    w, idle, free = table(), Variable(np.ones(4) * 9, name="idle"), Variable([9.0], name="free")
    adam = gpuopt.AdamOptimizer(0.1)
    optimizer = VariableClippingOptimizer(adam, {w: [1], idle: [0]}, 1.0)
    optimizer.apply_gradients(
        [(np.full((3, 4), 50, np.float32), w), (None, idle), (np.float32([0]), free)]
    )
    np.testing.assert_allclose(np.linalg.norm(w.numpy(), axis=1), 1, rtol=1e-6)
    assert idle.numpy().tolist() == [9] * 4
    assert free.numpy().tolist() == [9]
    np.testing.assert_allclose(optimizer.get_slot(w, "m").numpy(), 5, rtol=1e-6)
    assert optimizer.get_name() == "VariableClipping"
    assert optimizer.variables() == adam.variables()


def test_a_sparse_gradient_has_its_own_rows_clipped_once(caplog: Any) -> None:
    w = Variable(np.full((4, 1), 10, np.float32), name="w")
    optimizer = VariableClippingOptimizer(sgd(), {w: [1]}, 3.0)
    gradient = IndexedSlices(np.float32([[1], [1], [1]]), np.array([2, 0, 2]))
    optimizer.apply_gradients([(gradient, w)])
    assert w.numpy().ravel().tolist() == [3, 10, 3, 10]
    assert not caplog.records


@pytest.mark.contract
def test_clipping_all_rows_for_a_sparse_gradient_warns_once(caplog: Any) -> None:
    w = Variable(np.full((4, 1), 10, np.float32), name="w")
    optimizer = VariableClippingOptimizer(sgd(), {w: [0]}, 10.0)
    for _ in range(2):
        optimizer.apply_gradients([(IndexedSlices(np.zeros((1, 1), np.float32), [2]), w)])
    assert w.numpy().ravel().tolist() == [5, 5, 5, 5]
    [record] = caplog.records
    assert 'Clipping norm across dims [0] for "w" is inefficient' in record.getMessage()


def test_constrained_variables_are_clipped_after_the_constraint() -> None:
    w = Variable(np.float32([3, -4]), name="w", constraint=lambda array: np.maximum(array, 0))
    optimizer = VariableClippingOptimizer(sgd(), {w: [0]}, 2.0)
    optimizer.apply_gradients([(np.float32([0, 0]), w)])
    assert w.numpy().tolist() == [2, 0]


def test_an_error_in_clipping_says_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory for what is clipped")

    w, step = table(), Variable(0, name="step")
    optimizer = gpuopt.MovingAverageOptimizer(
        gpuopt.MultitaskOptimizerWrapper(VariableClippingOptimizer(sgd(), {w: [1]}, 1.0))
    )
    monkeypatch.setattr(Variable, "assign", fail)
    with pytest.raises(MemoryError) as raised:
        optimizer.apply_gradients([(np.ones((3, 4), np.float32), w)], global_step=step)
    assert raised.value.__notes__ == [
        'The step of "GradientDescent" was not finished. Updated: "table". Done, in part, or not '
        "at all: clipping, moving averages."
    ]
    assert int(step) == 1
    optimizer.accept_unfinished_step()
    assert int(step) == 1


def test_variables_that_are_gone_are_forgotten() -> None:
    w = table()
    optimizer = VariableClippingOptimizer(sgd(), {w: [1]}, 2.0)
    del w
    assert not optimizer._dims
    assert not gpuopt.global_variables()


def test_a_save_never_sees_a_variable_before_it_is_clipped(tmp_path: Path) -> None:
    w = Variable(np.zeros(1000), name="w")
    optimizer = VariableClippingOptimizer(sgd(), {w: [0]}, 1.0, use_locking=True)
    with repeated(lambda: optimizer.apply_gradients([(-np.ones(1000), w)]), threads=2):
        saver = gpuopt.Saver([w], max_to_keep=1)
        for number in range(30):
            saved = load_file(saver.save(tmp_path / "model", global_step=number))["w"]
            assert np.linalg.norm(saved) <= 1 + 1e-12


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@every_dtype
@pytest.mark.parametrize("sparse", [False, True])
def test_clipping_on_a_gpu_equals_that_on_the_host(dtype: Any, sparse: bool) -> None:
    rng = np.random.default_rng(2)
    start, gradient = (rng.normal(size=(5, 3)).astype(dtype) for _ in range(2))
    clipped = []
    for device in ("cpu", "gpu:0"):
        w = Variable(start, device=device)
        given: Any = Variable(gradient, device=device).storage
        if sparse:
            rows = Variable([4, 1, 1, 0, 3], dtype=np.int32, device=device).storage
            given = IndexedSlices(given, rows)
        optimizer = VariableClippingOptimizer(sgd(), {w: [1]}, 0.8)
        optimizer.apply_gradients([(given, w)])
        before = fake_cupy.counts.synchronisations
        optimizer.apply_gradients([(given, w)])
        assert fake_cupy.counts.synchronisations == before
        clipped.append(w.numpy().astype(np.float64))
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(*clipped, rtol=tolerance, atol=tolerance)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_a_step_that_a_gpu_refuses_clips_nothing_there() -> None:
    w = table(device="gpu:0")
    rows = Variable([0, 3], dtype=np.int64, device="gpu:0").storage
    values = Variable(np.zeros((2, 4), np.float32), device="gpu:0").storage
    optimizer = VariableClippingOptimizer(sgd(), {w: [1]}, 1.0)
    optimizer.apply_gradients([(IndexedSlices(values, rows), w)])
    with pytest.raises(IndexError, match=r'"table": row 3 is not in \[0, 3\)'):
        optimizer.check()
    np.testing.assert_array_equal(w.numpy(), np.full((3, 4), 2))
