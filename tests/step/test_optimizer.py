"""The Optimizer's interface: calls, subclass hooks, locking, and input that it refuses."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from other_thread import in_threads

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.optimizer import _var_key

pytestmark = pytest.mark.contract


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def loss_with(gradients: Any, value: Any = 1.0) -> Any:
    return gpuopt.with_gradients(lambda: (value, gradients))


# compute_gradients and minimize


def test_gradients_come_in_the_order_of_var_list_with_none_for_the_unconnected() -> None:
    a, b, c = (Variable(ones(2), name=name) for name in "abc")
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    loss = loss_with({c: ones(2), a: 2 * ones(2)})
    pairs = optimizer.compute_gradients(loss, var_list=[a, [b, (c,)]])
    assert [variable.name for _, variable in pairs] == ["a", "b", "c"]
    assert pairs[0][0].tolist() == [2, 2]
    assert pairs[1][0] is None
    assert [v.name for _, v in optimizer.compute_gradients(loss)] == ["c", "a"]


def test_gradients_may_be_a_sequence_beside_var_list_and_variables_raw_arrays() -> None:
    w = ones(2)
    optimizer = gpuopt.GradientDescentOptimizer(0.5)
    optimizer.minimize(loss_with([ones(2)]), var_list=[w])
    assert w.tolist() == [0.5, 0.5]


def test_grad_loss_scales_dense_and_sparse_gradients() -> None:
    a, b = Variable(ones(2)), Variable(ones(2, 1))
    slices = IndexedSlices(ones(1, 1), [1])
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss_with({a: ones(2), b: slices}), grad_loss=3.0)
    assert pairs[0][0].tolist() == [3, 3]
    assert pairs[0][0].dtype == np.float32
    assert pairs[1][0].values.tolist() == [[3]]
    assert pairs[1][0].indices is slices.indices


def test_minimize_updates_and_counts_once() -> None:
    w, step = Variable(ones(2)), Variable(0, name="global_step")
    returned = gpuopt.GradientDescentOptimizer(0.5).minimize(loss_with({w: ones(2)}), step)
    assert returned is None
    assert w.numpy().tolist() == [0.5, 0.5]
    assert int(step) == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda o, v: o.minimize(1.0), RuntimeError, "should be a function"),
        (lambda o, v: o.minimize(lambda: 1.0), ValueError, "No variables to optimize"),
        (
            lambda o, v: o.minimize(lambda: 1.0, var_list=[v]),
            ValueError,
            "does not depend on ['w']",
        ),
        (
            lambda o, v: o.minimize(lambda: 1.0, var_list=[Variable(1, name="n")]),
            ValueError,
            '"n" is int32, and integers are constants',
        ),
        (lambda o, v: o.minimize(loss_with(3)), TypeError, "mapping from variable to gradient"),
        (lambda o, v: o.minimize(loss_with([None])), ValueError, "needs var_list"),
        (lambda o, v: o.minimize(loss_with([None] * 2), var_list=[v]), ValueError, "2 gradients"),
        (lambda o, v: o.minimize(loss_with({v: None})), ValueError, "does not depend on ['w']"),
        (
            lambda o, v: o.minimize(gpuopt.with_gradients(lambda: 1.0)),
            TypeError,
            "must return (value, gradients)",
        ),
        (
            lambda o, v: o.minimize(loss_with({v: ones(2)}), grad_loss=ones(2)),
            ValueError,
            "grad_loss must be a scalar",
        ),
        (lambda o, v: gpuopt.with_gradients(3), TypeError, "decorates a function"),
        (
            lambda o, v: o.compute_gradients(loss_with({Variable(1, name="n"): 1})),
            ValueError,
            'Invalid type int32 for "n"',
        ),
    ],
)
def test_bad_loss_is_refused(call: Any, error: type[Exception], words: str) -> None:
    v = Variable(ones(2), name="w")
    with pytest.raises(error) as raised:
        call(gpuopt.GradientDescentOptimizer(0.1), v)
    assert words in str(raised.value)
    assert v.numpy().tolist() == [1, 1]


# Input that apply_gradients refuses

w_shape = (4, 3)


def rows(indices: Any, values: Any = None, dense_shape: Any = None) -> IndexedSlices:
    indices = np.asarray(indices)
    return IndexedSlices(ones(len(indices), 3) if values is None else values, indices, dense_shape)


class OnAGPU:
    """An array that claims to be on a GPU, as a CuPy array does."""

    shape, dtype = w_shape, np.dtype(np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)


class OnATPU(OnAGPU):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (99, 0)


class AsArray:
    """No array, but has one."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array


BAD_GRADIENTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "wrong shape": (lambda: ones(3, 4), ValueError, "has shape (3, 4); the variable has shape"),
    "broadcastable shape": (lambda: ones(3), ValueError, "pass IndexedSlices"),
    "scalar": (lambda: 1.0, ValueError, "has shape ()"),
    "integers": (lambda: ones(*w_shape, dtype=np.int32), TypeError, "has dtype int32"),
    "complex": (lambda: ones(*w_shape, dtype=np.complex64), TypeError, "has dtype complex64"),
    "wider floats": (lambda: ones(*w_shape, dtype=np.float64), TypeError, "has dtype float64"),
    "16-bit floats": (
        lambda: ones(*w_shape, dtype=ml_dtypes.bfloat16),
        TypeError,
        "has dtype bfloat16",
    ),
    "objects": (lambda: np.full(w_shape, None), TypeError, "has dtype object"),
    "text": (lambda: "text", TypeError, "convertible"),
    "ragged list": (lambda: [[1.0], [1.0, 2.0]], ValueError, "inhomogeneous"),
    "masked": (lambda: np.ma.masked_array(ones(*w_shape)), TypeError, "masked"),
    "an object that is an array of integers": (
        lambda: AsArray(ones(*w_shape, dtype=np.int32)),
        TypeError,
        "has dtype int32",
    ),
    "an object that is an array of wider floats": (
        lambda: AsArray(ones(*w_shape, dtype=np.float64)),
        TypeError,
        "has dtype float64",
    ),
    "a buffer of integers": (
        lambda: memoryview(ones(*w_shape, dtype=np.int64)),
        TypeError,
        "has dtype int64",
    ),
    "row too large": (lambda: rows([0, 4]), IndexError, "indices[1] = 4 is not in [0, 4)"),
    "row negative": (lambda: rows([-1]), IndexError, "indices[0] = -1 is not in [0, 4)"),
    "rows of wrong width": (lambda: rows([0], ones(1, 2)), ValueError, "rows of shape (2,)"),
    "rows of another dtype": (
        lambda: rows([0], ones(1, 3, dtype=np.float64)),
        TypeError,
        "has dtype float64",
    ),
    "dense_shape of another table": (
        lambda: rows([0], dense_shape=(5, 3)),
        ValueError,
        "dense_shape (5, 3)",
    ),
    "on a GPU": (
        lambda: OnAGPU(),
        gpuopt.DeviceUnavailableError,
        "is on gpu:1, the variable on cpu",
    ),
}


@pytest.mark.parametrize("defect", BAD_GRADIENTS)
def test_bad_gradient_is_refused_by_name_before_anything_is_written(defect: str) -> None:
    make, error, words = BAD_GRADIENTS[defect]
    first, w = Variable(ones(2), name="first"), Variable(ones(*w_shape), name="w")
    step = Variable(0, name="global_step")
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.apply_gradients([(ones(2), first), (rows([1]), w)], global_step=step)
    before = all_bytes()
    with pytest.raises(error) as raised:
        optimizer.apply_gradients([(ones(2), first), (make(), w)], global_step=step)
    assert '"w"' in str(raised.value)
    assert words in str(raised.value)
    assert all_bytes() == before


def all_bytes() -> dict[str, bytes]:
    return {variable.name: variable.numpy().tobytes() for variable in gpuopt.global_variables()}


BAD_CALLS: dict[str, tuple[Callable[[Variable], Any], type[Exception], str]] = {
    "three in a pair": (lambda w: [(1, w, 2)], ValueError, "grads_and_vars[0] must be a (gradient"),
    "no pair": (lambda w: [3], TypeError, "grads_and_vars[0] must be a (gradient, variable) pair"),
    "not iterable": (lambda w: 3, TypeError, "must be an iterable"),
    "empty": (lambda w: [], ValueError, "No variables provided"),
    "all None": (
        lambda w: [(None, w)],
        ValueError,
        "No gradients provided for any variable: ['w']",
    ),
    "no variable": (lambda w: [(1.0, "w")], TypeError, "grads_and_vars[0]: expected a Variable"),
    "same variable twice": (
        lambda w: [(ones(*w_shape), w)] * 2,
        ValueError,
        '"w" appears twice',
    ),
    "overlapping memory": (
        lambda w: [(ones(*w_shape), w), (ones(3), w.value()[2])],
        ValueError,
        'shares memory with "w"',
    ),
    "same raw array twice": (
        lambda w: [(ones(3), w.value()[0]), (ones(3), w.value()[0])],
        ValueError,
        "appears twice",
    ),
    "an overlap behind a longer reach": (
        lambda w: [
            (ones(*w_shape), w),
            (ones(1), w.value().reshape(-1)[1:2]),
            (ones(1), w.value().reshape(-1)[5:6]),
        ],
        ValueError,
        'shares memory with "w"',
    ),
    "integer variable": (
        lambda w: [(ones(2, dtype=np.int32), Variable(np.int32([1, 2]), name="n"))],
        ValueError,
        'Invalid type int32 for "n"',
    ),
    "variable on a GPU": (
        lambda w: [(ones(*w_shape), OnAGPU())],
        gpuopt.DeviceUnavailableError,
        '"gpu:1" was asked for',
    ),
    "variable on a TPU": (lambda w: [(ones(*w_shape), OnATPU())], ValueError, "DLPack device"),
    "a swapped pair": (
        lambda w: [(w, ones(*w_shape))],
        TypeError,
        'grads_and_vars[0] is (Variable "w", ndarray of dtype float32), which looks swapped',
    ),
    "a swapped pair of rows": (lambda w: [(w, rows([1]))], TypeError, "looks swapped"),
    "masked variable": (
        lambda w: [(ones(3), np.ma.masked_array(ones(3), [0, 0, 1]))],
        TypeError,
        "grads_and_vars[0]: the variable is a masked array; fill it first",
    ),
    "a variable that overlaps itself": (
        lambda w: [
            (ones(3, 2), np.lib.stride_tricks.sliding_window_view(ones(4), 2, writeable=True))
        ],
        ValueError,
        "has several elements on the same memory",
    ),
    "memory of unknown owner": (
        lambda w: [(ones(3), np.from_dlpack(ones(3)))],
        ValueError,
        "Make a variable of the array once, by gpuopt.Variable(array, copy=False)",
    ),
    "rows of a scalar": (
        lambda w: [(IndexedSlices(ones(1), [0]), Variable(1.0, name="s"))],
        ValueError,
        'gradient for "s" is IndexedSlices, but a scalar has no rows',
    ),
    "rows under a constraint": (
        lambda w: [(IndexedSlices(ones(1), [0]), Variable([1.0], name="c", constraint=np.abs))],
        RuntimeError,
        'Cannot use a constraint function on a sparse variable: "c"',
    ),
}


@pytest.mark.parametrize("defect", BAD_CALLS)
def test_bad_call_is_refused_before_anything_is_written(defect: str) -> None:
    make, error, words = BAD_CALLS[defect]
    w = Variable(ones(*w_shape), name="w")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    before = w.numpy()
    with pytest.raises(error) as raised:
        optimizer.apply_gradients(make(w))
    assert words in str(raised.value)
    assert np.array_equal(w.numpy(), before)
    assert optimizer.variables() == []


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (3, TypeError),
        (lambda: Variable(ones(2)), TypeError),
        (lambda: Variable(True), TypeError),
        (lambda: np.broadcast_to(np.int64(0), ()), ValueError),
    ],
)
def test_bad_global_step_is_refused_before_anything_is_written(
    step: Any, error: type[Exception]
) -> None:
    w = Variable(ones(2))
    given = step() if callable(step) else step
    with pytest.raises(error, match="global_step"):
        gpuopt.GradientDescentOptimizer(0.1).apply_gradients([(ones(2), w)], global_step=given)
    assert w.numpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: gpuopt.AdagradOptimizer(0.1, float("nan")),
            ValueError,
            "must be above 0",
        ),
        (
            lambda: gpuopt.FtrlOptimizer(0.1, l1_regularization_strength=float("nan")),
            ValueError,
            "l1_regularization_strength must be at least 0, got nan",
        ),
        (
            lambda: gpuopt.FtrlOptimizer(0.1, learning_rate_power=float("nan")),
            ValueError,
            "learning_rate_power must be at most 0, got nan",
        ),
        (lambda: gpuopt.AdamOptimizer("fast"), TypeError, "learning_rate must be a number"),
        (lambda: gpuopt.AdamOptimizer(1j), TypeError, "learning_rate must be a number"),
        (lambda: gpuopt.AdamOptimizer(beta1=[0.9]), ValueError, "beta1 must be a scalar"),
        (lambda: gpuopt.AdamOptimizer(None), TypeError, "learning_rate must be a number"),
        (
            lambda: gpuopt.AdamOptimizer(epsilon=ones(2)),
            ValueError,
            "epsilon must be a scalar, got an array of shape (2,)",
        ),
        (lambda: gpuopt.AdamOptimizer(name=7), TypeError, "name must be text"),
        (lambda: gpuopt.AdagradDAOptimizer(0.1, 0), TypeError, "global_step"),
    ],
)
def test_bad_hyperparameter_is_refused_when_the_optimizer_is_made(
    make: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value)


def test_bad_value_of_a_callable_hyperparameter_is_refused_before_a_write() -> None:
    w = Variable(ones(2))
    optimizer = gpuopt.GradientDescentOptimizer(lambda: "fast")
    with pytest.raises(TypeError, match="learning_rate must be a number"):
        optimizer.apply_gradients([(ones(2), w)])
    assert w.numpy().tolist() == [1, 1]


def test_disjoint_interleaved_views_may_be_updated_in_one_call() -> None:
    full = np.zeros(8, np.float32)
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
        [(ones(4), full[::2]), (2 * ones(4), full[1::2])]
    )
    assert full.tolist() == [-1, -2] * 4


# IndexedSlices


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: IndexedSlices(ones(2, 3), [0]),
            ValueError,
            "2 rows of values (shape (2, 3)) for 1",
        ),
        (lambda: IndexedSlices(np.float32(1), [0]), ValueError, "got a scalar"),
        (lambda: IndexedSlices(ones(2), [[0], [1]]), ValueError, "must be a vector"),
        (lambda: IndexedSlices(ones(2), [0.0, 1.0]), TypeError, "int32 or int64, got float64"),
        (lambda: IndexedSlices(ones(2), np.uint8([0, 1])), TypeError, "int32 or int64, got uint8"),
        (lambda: IndexedSlices(ones(2), [True, False]), TypeError, "int32 or int64, got bool"),
        (lambda: IndexedSlices(np.full(2, None), [0, 1]), TypeError, "must be numbers"),
        (lambda: IndexedSlices(ones(2, 3), [0, 1], (5, 4)), ValueError, "rows of dense_shape"),
        (lambda: IndexedSlices(ones(2, 3), [0, 1], (-5, 3)), ValueError, "must not be negative"),
    ],
)
def test_malformed_slices_are_refused_when_made(
    make: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value)


def test_slices_keep_the_arrays_that_they_are_given() -> None:
    values, indices = ones(2, 3), np.int32([0, 1])
    slices = IndexedSlices(values, indices, (5, 3))
    assert slices.values is values
    assert slices.indices is indices
    assert slices.dense_shape == (5, 3)
    assert slices.dtype == np.float32
    assert slices.device == gpuopt.Device.cpu
    assert IndexedSlices([], []).indices.dtype == np.int64
    assert "IndexedSlices(values=" in repr(slices)


# The subclass contract


class PlainMomentum(gpuopt.Optimizer):
    """Momentum as a user wrote it for TensorFlow 1, in plain array code."""

    def __init__(self, learning_rate=0.1, use_locking=False, name="PlainMomentum"):
        super().__init__(use_locking, name)
        self._lr = learning_rate
        self.finished = []

    def _create_slots(self, var_list):
        for v in var_list:
            self._zeros_slot(v, "a", self._name)
            self._get_or_make_slot(v, np.full(v.shape, 2.0), "b", self._name)
            self._get_or_make_slot_with_initializer(
                v, lambda shape, dtype: np.full(shape, 3, dtype), (2,), np.float64, "c", "other"
            )
        self._create_non_slot_variable(1.0, "decay", var_list[0])

    def _prepare(self):
        self._lr_t = self._call_if_callable(self._lr)

    def _apply_dense(self, grad, var):
        a = self.get_slot(var, "a")
        a.assign(0.9 * a + grad)
        var -= self._lr_t * a

    def _apply_sparse(self, grad, var):
        a = self.get_slot(var, "a")
        a[grad.indices] = 0.9 * a[grad.indices] + grad.values
        var[grad.indices] -= self._lr_t * a[grad.indices]

    def _finish(self, update_ops, name_scope):
        decay = self._get_non_slot_variable("decay")
        decay.assign(decay * 0.5)
        self.finished.append((len(update_ops), name_scope))


def test_unmodified_tensorflow_subclass_runs() -> None:
    w, raw, table = Variable(ones(3), name="w"), ones(3), Variable(ones(4, 2), name="table")
    user, reference = PlainMomentum(lambda: 0.1), gpuopt.MomentumOptimizer(0.1, 0.9)
    copies = [Variable(ones(3)), Variable(ones(3)), Variable(ones(4, 2))]
    slices = IndexedSlices(ones(3, 2), [2, 0, 2])
    for _ in range(3):
        gradients = [ones(3), 2 * ones(3), slices]
        user.apply_gradients(zip(gradients, [w, raw, table], strict=True), name="train")
        reference.apply_gradients(zip(gradients, copies, strict=True))
    for got, expected in zip([w, raw, table], copies, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected.numpy(), rtol=1e-6)
    assert user.finished == [(3, "train")] * 3
    assert user.get_slot_names() == ["a", "b", "c"]
    assert user.get_slot(w, "b").numpy().tolist() == [2, 2, 2]
    assert user.get_slot(w, "c").dtype == np.float64
    assert user.get_slot(w, "c").name == "w/other"
    assert user._slot_dict("a")[_var_key(raw)] is user.get_slot(raw, "a")
    [decay] = [v for v in user.variables() if v.name == "decay"]
    assert float(decay) == 0.125
    assert user._get_non_slot_variable("missing") is None


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (gpuopt.Optimizer, "_apply_dense"),
        (gpuopt.AdamOptimizer, "_apply_dense"),
        (gpuopt.AdamOptimizer, "_resource_apply_dense"),
        (gpuopt.Optimizer, "_apply_sparse"),
        (gpuopt.AdamOptimizer, "_apply_sparse"),
        (gpuopt.Optimizer, "_resource_apply_sparse"),
        (gpuopt.AdamOptimizer, "_apply_sparse_duplicate_indices"),
        (gpuopt.AdamOptimizer, "_resource_apply_sparse_duplicate_indices"),
    ],
)
def test_each_hook_is_called_in_place_of_the_default(base: Any, hook: str) -> None:
    seen: list[Any] = []

    def record(self: Any, *arguments: Any) -> None:
        seen.append(arguments)

    user = type("User", (base,), {hook: record})
    optimizer = user(use_locking=False, name="User")
    w = Variable(ones(4, 2), name="w")
    is_sparse = "sparse" in hook
    gradient = IndexedSlices(ones(3, 2), [2, 0, 2]) if is_sparse else ones(4, 2)
    optimizer.apply_gradients([(gradient, w)])
    [arguments] = seen
    assert arguments[1] is w
    if is_sparse:
        first, indices = arguments[0], arguments[2] if "resource" in hook else None
        indices = first.indices if indices is None else indices
        expected = [2, 0, 2] if "duplicate" in hook else [2, 0]  # of first appearance
        assert indices.tolist() == expected
        values = first if "resource" in hook else first.values
        assert values[0].tolist() == ([1, 1] if "duplicate" in hook else [2, 2])
    assert w.numpy().tolist() == ones(4, 2).tolist()


def test_subclass_of_a_built_in_may_call_its_step() -> None:
    class Clipped(gpuopt.AdamOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            super()._apply_dense(np.clip(grad, -1, 1), var)

        def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> None:
            super()._apply_sparse(IndexedSlices(np.clip(grad.values, -1, 1), grad.indices), var)

    a, b = Variable(ones(4, 2)), Variable(ones(4, 2))
    user, reference = Clipped(0.1), gpuopt.AdamOptimizer(0.1)
    for make in (lambda x: x * ones(4, 2), lambda x: IndexedSlices(x * ones(1, 2), [3])):
        user.apply_gradients([(make(np.float32(5)), a)])
        reference.apply_gradients([(make(np.float32(1)), b)])
    assert np.array_equal(a.numpy(), b.numpy())


def test_sums_of_repeated_rows_may_overflow_without_a_warning_in_a_subclass() -> None:
    class User(gpuopt.GradientDescentOptimizer):
        def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> None:
            super()._apply_sparse(grad, var)

    table = Variable(np.zeros((2, 1), np.float16))
    slices = IndexedSlices(np.full((2, 1), 6e4, np.float16), [1, 1])
    User(1.0).apply_gradients([(slices, table)])
    assert table.numpy().ravel().tolist() == [0, -np.inf]


def test_valid_dtypes_may_be_overridden() -> None:
    class Halves(gpuopt.GradientDescentOptimizer):
        def _valid_dtypes(self) -> Any:
            return {np.float16}

    half = Variable(ones(2, dtype=np.float16))
    Halves(0.5).apply_gradients([(ones(2, dtype=np.float16), half)])
    assert half.numpy().tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="Invalid type float32"):
        Halves(0.5).apply_gradients([(ones(2), Variable(ones(2)))])


def test_variables_without_a_gradient_get_no_slots() -> None:
    a, b = Variable(ones(2), name="a"), Variable(ones(2), name="b")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(None, a), (ones(2), b)])
    assert optimizer.get_slot(a, "momentum") is None
    assert [v.name for v in optimizer.variables()] == ["b/Momentum"]


@pytest.mark.parametrize(
    "gradient",
    [[1, 2], (1.0, 2), [True, 2], AsArray(np.float32([1, 2])), memoryview(np.float32([1, 2]))],
)
def test_gradients_may_be_numbers_in_lists_or_have_the_right_type(gradient: Any) -> None:
    w = Variable([0.0, 0.0])
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(gradient, w)])
    assert w.numpy().tolist() == [-1, -2]


def test_a_plain_array_may_be_updated_by_a_variables_value() -> None:
    w, array = Variable([1.0, 2.0]), np.zeros(2, np.float32)
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(w.value(), array)])
    assert array.tolist() == [-1, -2]


def test_global_step_grows_after_finish_and_may_be_an_array() -> None:
    seen: list[int] = []
    step = np.array(5, np.int64)

    class Watching(gpuopt.GradientDescentOptimizer):
        def _finish(self, update_ops: Any, name_scope: str) -> None:
            seen.append(int(step))

    Watching(0.1).apply_gradients([(ones(2), Variable(ones(2)))], global_step=step)
    assert seen == [5]
    assert step == 6


def test_constraint_of_the_wrong_shape_names_the_variable() -> None:
    v = Variable(ones(2), name="v", constraint=lambda array: array[:1])
    with pytest.raises(ValueError, match='"v" has shape'):
        gpuopt.GradientDescentOptimizer(0.1).apply_gradients([(ones(2), v)])


# Threads


@pytest.mark.parametrize("kind", ["GradientDescent", "Plain", "Raw"])
def test_locked_threads_lose_no_update(kind: str) -> None:
    """Applies of 1 to variables large enough for numpy to let other threads in."""
    threads, applies = 4, 2_500 if os.environ.get("GPUOPT_FULL") else 500
    w: Any = Variable(np.zeros(20_000, np.float32))
    target = np.zeros(20_000, np.float32) if kind == "Raw" else w
    step = Variable(0, name="global_step", dtype=np.int64)
    gradient = np.full(20_000, -1, np.float32)

    class Plain(gpuopt.Optimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            var.assign(var.value() - grad)  # reads, and writes later

    optimizer = (
        Plain(use_locking=True, name="Plain")
        if kind == "Plain"
        else gpuopt.GradientDescentOptimizer(1.0, use_locking=True)
    )

    def work() -> None:
        for _ in range(applies):
            optimizer.apply_gradients([(gradient, target)], global_step=step)

    in_threads(*[work] * threads)
    assert int(step) == threads * applies
    assert np.unique(np.asarray(target)).tolist() == [threads * applies]


def test_locked_threads_with_several_variables_do_not_wait_for_each_other_forever() -> None:
    a, b = Variable(np.zeros(5000, np.float32)), Variable(np.zeros(5000, np.float32))
    optimizer = gpuopt.AdamOptimizer(0.1, use_locking=True)
    gradient = np.ones(5000, np.float32)
    pairs = [(gradient, a), (gradient, b)]

    def work(order: int) -> None:
        for _ in range(300):
            optimizer.apply_gradients(pairs[::order])

    in_threads(partial(work, 1), partial(work, -1))
    [power] = [v for v in optimizer.variables() if v.name == "beta1_power"]
    expected = np.float32(0.9)
    for _ in range(600):
        expected = expected * np.float32(0.9)
    assert power.numpy() == expected


def test_first_step_of_many_threads_makes_each_slot_once() -> None:
    for _ in range(20):
        w, optimizer = Variable(np.zeros(4, np.float32)), gpuopt.AdamOptimizer(0.1)
        barrier = threading.Barrier(4)

        def work(w: Any = w, optimizer: Any = optimizer, barrier: Any = barrier) -> None:
            barrier.wait()
            optimizer.apply_gradients([(np.ones(4, np.float32), w)])

        in_threads(*[work] * 4)
        assert len(optimizer.variables()) == 4


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda g, a, b: [(ones(3), a), (g, b)], ValueError),
        (lambda g, a, b: [(ones(2, dtype=np.float64), a), (g, b)], TypeError),
        (lambda g, a, b: [(g, a, "more"), (g, b, "more")], ValueError),
        (lambda g, a, b: [(g, a), (g,)], ValueError),
        (lambda g, a, b: [(g, a), (np.ma.masked_array(g), b)], TypeError),
        (lambda g, a, b: [(g, a), (IndexedSlices(ones(1), [5]), b)], IndexError),
        (lambda g, a, b: [(g, a), (g, a)], ValueError),
    ],
)
def test_a_later_step_is_checked_like_the_first(bad: Any, error: type[Exception]) -> None:
    a, b = (Variable(ones(2), name=name) for name in "ab")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    for _ in range(2):
        optimizer.apply_gradients([(ones(2), a), (ones(2), b)])
    before = [variable.numpy().tobytes() for variable in (a, b, *optimizer.variables())]
    with pytest.raises(error):
        optimizer.apply_gradients(bad(ones(2), a, b))
    assert [v.numpy().tobytes() for v in (a, b, *optimizer.variables())] == before
    optimizer.apply_gradients([([1.0, 1.0], a), (None, b)])  # of another form, and right


def test_what_is_known_of_variables_goes_with_them() -> None:
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    arrays = []
    for shape in ((2,), (3,), (2,)):  # the next variable may well have the last one's id
        w = Variable(ones(*shape))
        optimizer.apply_gradients([(ones(*shape), w)])
        assert w.numpy().tolist() == [0.0] * shape[0]
        arrays.append(weakref.ref(w.storage))
        del w
    assert [array() for array in arrays] == [None] * 3


def test_gradients_that_are_variables_are_read_in_each_step() -> None:
    w, gradient = Variable(np.zeros(2, np.float32)), Variable(np.ones(2, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    given = [(gradient, w)]
    for step in range(8):
        optimizer.apply_gradients(given)
        assert w.numpy().tolist() == [-1 - step] * 2


def test_a_variable_that_had_no_gradient_so_far_is_updated_when_it_has_one() -> None:
    a, b = (Variable(np.zeros(2, np.float32)) for _ in range(2))
    gradient = np.ones(2, np.float32)
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    for _ in range(4):
        optimizer.apply_gradients([(gradient, a)])
    for _ in range(4):
        optimizer.apply_gradients([(gradient, a), (None, b)])
    for _ in range(4):
        optimizer.apply_gradients([(gradient, a), (gradient, b)])
    assert a.numpy().tolist() == [-12] * 2
    assert b.numpy().tolist() == [-4] * 2
