"""Which memory one call may write, and errors that name the variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import (
    FixedLossScaleManager,
    GradientAccumulationOptimizer,
    GradientDescentOptimizer,
    IndexedSlices,
    LossScaleOptimizer,
    Variable,
    clip_gradients_by_global_norm,
)
from gpuopt.step.overlap import refuse_shared_memory
from gpuopt.variables.variable import as_variable

pytestmark = pytest.mark.contract


def variable_with_slot() -> tuple[Variable, Variable]:
    w = Variable(np.zeros(3, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    slot = optimizer.get_slot(w, "momentum")
    assert slot is not None
    return w, slot


def test_a_variable_its_slot_and_a_counter_are_three_memories() -> None:
    w, slot = variable_with_slot()
    counter = Variable(0, name="counter")
    memory = np.zeros(6, np.float32)
    refuse_shared_memory([w], [slot, counter])
    refuse_shared_memory([w, as_variable(memory[:3])], [slot, as_variable(memory[3:])])


def test_a_slot_is_not_updated_beside_its_variable() -> None:
    w, slot = variable_with_slot()
    with pytest.raises(ValueError, match='"w/Momentum" would be written twice') as raised:
        refuse_shared_memory([w, slot], [slot])
    assert "as a slot or as the global step" in str(raised.value)
    alias = as_variable(slot.storage[1:])
    with pytest.raises(ValueError, match="would be written twice"):
        refuse_shared_memory([w, alias], [slot])


@pytest.mark.parametrize("count", [lambda memory: memory[3:4].reshape(()), lambda memory: memory])
def test_the_global_step_is_not_in_memory_that_is_updated(count: Any) -> None:
    memory = np.zeros(4, np.float32)
    w = Variable(memory, name="w", copy=False)
    counter = as_variable(count(memory))
    with pytest.raises(ValueError, match=r'memory of "w" and "array\w*" would be written twice'):
        refuse_shared_memory([w], [counter])
    with pytest.raises(ValueError, match='"w" would be written twice'):
        refuse_shared_memory([w], [w])


def test_a_slot_owns_its_memory_until_something_is_made_on_it() -> None:
    _, slot = variable_with_slot()
    assert slot.owns_memory
    assert not Variable(slot.storage, copy=False).owns_memory


class HookMomentum(gpuopt.MomentumOptimizer):
    def _apply_dense(self, grad: Any, var: Variable) -> None:
        super()._apply_dense(grad, var)


@pytest.mark.parametrize("optimizer", [gpuopt.MomentumOptimizer, HookMomentum])
def test_a_variable_and_its_slot_are_refused_in_one_call(optimizer: Any) -> None:
    v = Variable(np.zeros(3, np.float32), name="v")
    momentum, ones = optimizer(1.0, 0.5), np.ones(3, np.float32)
    step = Variable(0, name="step")
    momentum.apply_gradients([(ones, v)])
    slot = momentum.get_slot(v, "momentum")
    for pairs in ([(ones, v), (ones, slot)], [(ones, slot.storage[1:]), (ones, v)]):
        for counter in (None, step):
            pairs = [(ones[: len(variable)], variable) for _, variable in pairs]
            with pytest.raises(ValueError, match="would be written twice, once of it as a slot"):
                momentum.apply_gradients(pairs, global_step=counter)
    assert (v.numpy().tolist(), slot.numpy().tolist(), int(step)) == ([-1] * 3, [1] * 3, 0)
    momentum.apply_gradients([(ones, slot)])  # by itself, it is a variable like others
    assert slot.numpy().tolist() == [0] * 3


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise self.error


class RaisingWithDtype(Raising):
    dtype = np.dtype(np.float32)


@pytest.mark.parametrize(
    ("gradient", "make_error", "expected"),
    [
        (RaisingWithDtype, lambda: ValueError("inner"), ValueError),
        (Raising, lambda: ValueError("inner"), ValueError),
        (Raising, lambda: TypeError("inner"), TypeError),
        (Raising, lambda: UnicodeDecodeError("ascii", b"", 0, 1, "inner"), ValueError),
        (Raising, lambda: RuntimeError("inner"), RuntimeError),
        (Raising, lambda: MemoryError("inner"), MemoryError),
    ],
)
def test_what_a_gradients_own_code_raises_names_the_variable(
    gradient: Any, make_error: Any, expected: type[Exception]
) -> None:
    error = make_error()
    w = Variable(np.zeros(2, np.float32), name="w")
    with pytest.raises(expected, match="inner") as raised:
        gpuopt.MomentumOptimizer(0.1, 0.9).apply_gradients([(gradient(error), w)])
    assert error in (raised.value, raised.value.__cause__)
    said = [str(raised.value), *getattr(raised.value, "__notes__", [])]
    assert 'gradient for "w"' in " ".join(said)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda values, rows: setattr(rows, "dtype", np.int16), TypeError, "got int16"),
        (lambda values, rows: setattr(rows, "shape", (1, 2)), ValueError, r"shape \(1, 2\)"),
        (lambda values, rows: setattr(values, "shape", (4,)), ValueError, "4 rows of values"),
    ],
)
def test_slices_that_are_changed_in_place_are_refused_with_the_variables_name(
    change: Any, error: type[Exception], words: str
) -> None:
    table = Variable(np.zeros((9, 2), np.float32), name="table")
    values, rows = np.ones((2, 2), np.float32), np.array([0, 1])
    slices = IndexedSlices(values, rows)
    change(values, rows)
    with pytest.raises(error, match=f'gradient for "table": IndexedSlices .*{words}'):
        gpuopt.MomentumOptimizer(0.1, 0.9).apply_gradients([(slices, table)])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: inner,
        lambda inner: LossScaleOptimizer(inner, FixedLossScaleManager(8)),
        lambda inner: GradientAccumulationOptimizer(inner, 2),
        lambda inner: GradientDescentOptimizer(0.1, on_nonfinite="skip"),
    ],
    ids=["plain", "loss_scale", "accumulation", "nonfinite"],
)
def test_a_pair_without_its_list_is_refused_before_its_rows_are_taken_for_a_pair(wrap: Any) -> None:
    gradient, variable = np.ones((2, 3), np.float32), Variable(np.zeros((2, 3), np.float32))
    optimizer = wrap(GradientDescentOptimizer(0.1))
    pairs: tuple[Any, ...] = (
        (gradient, variable),
        [gradient, variable],
        (Variable(gradient), variable),
    )
    for pair in pairs:
        with pytest.raises(ValueError, match=r"of shape \(2, 3\).*\[\(gradient, variable\)\]"):
            optimizer.apply_gradients(pair)
    for pair in pairs[:2]:
        with pytest.raises(ValueError, match=r"\[\(gradient, variable\)\]"):
            clip_gradients_by_global_norm(pair)
    assert not variable.numpy().any()
    assert (gradient == 1).all()


class OwnError(ValueError):
    """An error that cannot be made of a message alone, as those of some libraries."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


class Eager:
    """Its `__iter__` computes all elements at once, and fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise self.error


def failing_generator(error: Exception) -> Any:
    yield from ()
    raise error


CALLS_THAT_ITERATE = {
    "apply_gradients": lambda given: GradientDescentOptimizer(1.0).apply_gradients(given),
    "a pair": lambda given: GradientDescentOptimizer(1.0).apply_gradients([given]),
    "clipped pairs": lambda given: clip_gradients_by_global_norm(given, 1.0),
    "accumulated": lambda given: GradientAccumulationOptimizer(
        GradientDescentOptimizer(1.0), 2
    ).apply_gradients(given),
    "scaled": lambda given: LossScaleOptimizer(
        GradientDescentOptimizer(1.0), FixedLossScaleManager(2.0)
    ).apply_gradients(given),
    "Saver": lambda given: gpuopt.Saver(given),
    "averages": lambda given: gpuopt.ExponentialMovingAverage(0.5).apply(given),
    "a group": lambda given: gpuopt.ParameterGroup(variables=given, learning_rate=1.0),
    "decay_var_list": lambda given: gpuopt.AdamWOptimizer(0.1).minimize(
        lambda: 0.0, decay_var_list=given
    ),
    "dimensions": lambda given: gpuopt.VariableClippingOptimizer(
        GradientDescentOptimizer(1.0), {Variable(np.ones(3), name="w"): given}, 1.0
    ),
}


@pytest.mark.parametrize("call", CALLS_THAT_ITERATE.values(), ids=CALLS_THAT_ITERATE)
def test_an_error_of_the_users_own_iterable_stays_what_it_is(call: Any) -> None:
    for make, kind in ((Eager, TypeError), (failing_generator, TypeError), (Eager, OwnError)):
        error = kind(1, "the user's own")
        with pytest.raises(type(error)) as raised:
            call(make(error))
        assert raised.value is error


@pytest.mark.parametrize("call", CALLS_THAT_ITERATE.values(), ids=CALLS_THAT_ITERATE)
def test_what_has_no_elements_is_refused_by_name(call: Any) -> None:
    for given in (5, np.array(5.0)):
        with pytest.raises((TypeError, ValueError), match=r"must be a|expected a|decay_var_list"):
            call(given)


class Listed(list[Any]):
    """A variable whose own code fails."""

    @property
    def __dlpack_device__(self) -> Any:
        raise OwnError(1, "the user's own")


def test_an_error_of_a_variables_own_code_names_its_position() -> None:
    with pytest.raises(ValueError, match=r"grads_and_vars\[0\].*the user's own") as raised:
        GradientDescentOptimizer(1.0).apply_gradients([(1.0, Listed())])
    assert isinstance(raised.value.__cause__, OwnError)
    with pytest.raises(ValueError, match=r"global_step.*the user's own"):
        GradientDescentOptimizer(1.0).apply_gradients([(1.0, Variable(0.0))], Listed())
