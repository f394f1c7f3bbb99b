"""When variables are updated: after all gradients, or inside the backward pass (GATE_NONE)."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from autograd.extend import defvjp, defvjp_argnum, primitive
from losses import Gate, Language, Model, sgd

import gpuopt
from gpuopt import Variable
from gpuopt.variables.recording import recorder

pytestmark = pytest.mark.contract


def test_gates_lead_to_the_same_bits(language: Language) -> None:
    ends = []
    for gate in (Gate.GATE_NONE, Gate.GATE_OP, Gate.GATE_GRAPH):
        model, step = Model(language), Variable(0, name="global_step", dtype=np.int64)
        optimizer = gpuopt.AdamOptimizer(0.1)
        for _ in range(3):
            optimizer.minimize(model.loss, step, gate_gradients=gate)
        assert int(step) == 3
        states = [*model.variables.values(), *optimizer.variables()]
        ends.append([state.numpy().tobytes() for state in states])
    assert ends[0] == ends[1] == ends[2]


@primitive
def fails_backward(x: Any) -> Any:
    return x


def _raise(gradient: Any) -> Any:
    raise ArithmeticError("in mid-backward")


defvjp(fails_backward, lambda ans, x: _raise)


@pytest.mark.parametrize("gate", [Gate.GATE_OP, Gate.GATE_GRAPH, Gate.GATE_NONE])
def test_an_error_in_mid_backward(gate: int) -> None:
    first, last = Variable([1.0], name="first"), Variable([1.0], name="last")
    step = Variable(0, name="global_step")
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.9)
    optimizer.minimize(lambda: np.sum(first * last), step)
    states = [first, last, step, *optimizer.variables()]
    before = [state.numpy().tobytes() for state in states]

    def loss() -> Any:
        return np.sum(last * fails_backward(first * 2))

    with pytest.raises(ArithmeticError, match="in mid-backward"):
        optimizer.minimize(loss, step, gate_gradients=gate)
    after = [state.numpy().tobytes() for state in states]
    if gate == Gate.GATE_NONE:  # `last` had its turn
        changed = {s.name for s, x, y in zip(states, before, after, strict=True) if x != y}
        assert changed == {"last", "last/Momentum"}
        with pytest.raises(RuntimeError, match="was not finished"):
            optimizer.minimize(lambda: np.sum(first * last), step, gate_gradients=gate)
        optimizer.accept_unfinished_step()
        assert int(step) == 2
    else:
        assert after == before
    num_steps = int(step)
    assert recorder() is None
    optimizer.minimize(lambda: np.sum(first * last), step, gate_gradients=gate)
    assert int(step) == num_steps + 1


def test_gate_none_holds_one_gradient_at_a_time() -> None:
    num_layers, size = 40, 128
    layers = [Variable(np.eye(size, dtype=np.float32)) for _ in range(num_layers)]
    x = np.ones((1, size), np.float32)
    optimizer = sgd(1e-3)

    def loss() -> Any:
        hidden = x
        for layer in layers:
            hidden = np.tanh(hidden @ layer)
        return np.sum(hidden)

    def peak(gate: int) -> int:
        optimizer.minimize(loss, gate_gradients=gate)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        optimizer.minimize(loss, gate_gradients=gate)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest - before

    of_a_gradient = layers[0].storage.nbytes
    assert peak(Gate.GATE_OP) > num_layers * of_a_gradient
    assert peak(Gate.GATE_NONE) < 5 * of_a_gradient


def test_gate_none_gives_way_with_one_warning_to_an_overridden_hook() -> None:
    class Clipped(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> None:
            pairs = list(grads_and_vars)
            sizes.append(len(pairs))
            super().apply_gradients(pairs, *args, **options)

    sizes: list[int] = []
    a, b = Variable([1.0]), Variable([1.0])
    optimizer = Clipped(0.1)

    def minimize() -> None:
        optimizer.minimize(lambda: np.sum(a * b), gate_gradients=Gate.GATE_NONE)

    with pytest.warns(UserWarning, match="Clipped overrides apply_gradients"):
        minimize()
    minimize()  # without a warning, which would be an error
    assert sizes == [2, 2]


@pytest.mark.parametrize("hook", ["compute_gradients", "apply_gradients"])
def test_gate_none_gives_way_to_a_hook_of_the_instance(hook: str) -> None:
    v, optimizer = Variable(np.zeros(2), name="v"), sgd(1.0)
    replaced, calls = getattr(optimizer, hook), []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(hook)
        return replaced(*arguments, **options)

    setattr(optimizer, hook, counted)
    with pytest.warns(UserWarning, match=f"overrides {hook}"):
        optimizer.minimize(lambda: np.sum(v * 1.0), gate_gradients=Gate.GATE_NONE)
    assert calls == [hook]
    assert v.numpy().tolist() == [-1, -1]


# Gradients and constants that are a variable's own memory


def ends(gate: int, make_loss: Any) -> list[list[float]]:
    """What minimize makes of two variables of 2 and 3, at the learning rate 1."""
    a, b = Variable(np.full(2, 2.0), name="a"), Variable(np.full(2, 3.0), name="b")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    for _ in range(2):
        optimizer.minimize(make_loss(a, b, optimizer), gate_gradients=gate)
    return [a.numpy().tolist(), b.numpy().tolist()]


@primitive
def product(x: Any, y: Any) -> Any:
    return x * y


# Not `g * y`, which would be new memory.
defvjp(product, lambda ans, x, y: lambda g: y, lambda ans, x, y: lambda g: x)


def with_values(a: Variable, b: Variable, optimizer: gpuopt.Optimizer) -> Any:
    return gpuopt.with_gradients(lambda: (0.0, {a: b.value(), b: a.value()}))


def with_slots(a: Variable, b: Variable, optimizer: gpuopt.Optimizer) -> Any:
    slot = optimizer.get_slot(a, "momentum")
    return gpuopt.with_gradients(
        lambda: (0.0, {a: b.value(), b: np.ones(2) if slot is None else slot.value() * 1.0})
    )


def with_storage(a: Variable, b: Variable, optimizer: gpuopt.Optimizer) -> Any:
    return lambda: np.sum((b * 1.0) * a.storage) + np.sum(a * 5.0)


def with_a_view_of_storage(a: Variable, b: Variable, optimizer: gpuopt.Optimizer) -> Any:
    return lambda: np.sum((b * 1.0) * a.storage[::-1]) + np.sum(a * 5.0)


def with_a_buffer_of_storage(a: Variable, b: Variable, optimizer: gpuopt.Optimizer) -> Any:
    constant = np.frombuffer(a.storage.data, a.dtype).reshape(a.shape)
    return lambda: np.sum((b * 1.0) * constant) + np.sum(a * 5.0)


def with_a_derivative_that_copies_nothing(
    a: Variable, b: Variable, optimizer: gpuopt.Optimizer
) -> Any:
    return lambda: np.sum(product(a, b))


@primitive
def product_of_all(*factors: Any) -> Any:
    return math.prod(factors)


# autograd computes these one after the other.
defvjp_argnum(
    product_of_all,
    lambda argnum, ans, args, options: (
        lambda g: g * math.prod(x for i, x in enumerate(args) if i != argnum)
    ),
)


def with_derivatives_on_demand(a: Variable, b: Variable, optimizer: gpuopt.Optimizer) -> Any:
    return lambda: np.sum(product_of_all(a, b, 2.0))


@pytest.mark.parametrize(
    "make_loss",
    [
        with_derivatives_on_demand,
        with_values,
        with_slots,
        with_storage,
        with_a_view_of_storage,
        with_a_buffer_of_storage,
        with_a_derivative_that_copies_nothing,
    ],
)
def test_gates_agree_where_gradients_are_other_variables_memory(make_loss: Any) -> None:
    assert ends(Gate.GATE_NONE, make_loss) == ends(Gate.GATE_OP, make_loss)


def test_gate_none_sees_a_constant_that_a_variable_has_adopted_through_a_buffer() -> None:
    constant = np.ones(3, np.float32)
    a = Variable(np.frombuffer(constant.data, np.float32), copy=False, name="a")
    b = Variable(np.ones(3, np.float32), name="b")
    gpuopt.GradientDescentOptimizer(10.0).minimize(
        lambda: np.sum(b * constant) + np.sum(a * 5.0),
        var_list=[a, b],
        gate_gradients=Gate.GATE_NONE,
    )
    assert constant.tolist() == [-49] * 3
    assert b.numpy().tolist() == [-9] * 3


def test_gates_agree_where_a_constant_is_lent_memory_of_a_variable() -> None:
    def end(gate: int) -> list[float]:
        memory = np.full(2, 2.0)
        a = Variable(np.frombuffer(memoryview(memory), np.float64), name="a", copy=False)
        b = Variable(np.full(2, 3.0), name="b")
        sgd(1.0).minimize(lambda: np.sum((b * 1.0) * memory) + np.sum(a * 5.0), gate_gradients=gate)
        return b.numpy().tolist()

    assert end(Gate.GATE_NONE) == end(Gate.GATE_OP) == [1.0, 1.0]


@pytest.mark.torch
def test_torch_refuses_where_a_constant_is_a_variables_memory() -> None:
    import torch

    a, b = Variable(np.full(2, 2.0), name="a"), Variable(np.full(2, 3.0), name="b")

    @gpuopt.with_torch
    def loss() -> Any:
        return torch.sum((b.value() * 1.0) * a.value().detach()) + torch.sum(a.value() * 5.0)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sgd(1.0).minimize(loss, gate_gradients=Gate.GATE_NONE)
    sgd(1.0).minimize(loss)


@pytest.mark.parametrize("gate", [Gate.GATE_NONE, Gate.GATE_OP])
@pytest.mark.parametrize("slot_first", [False, True])
def test_a_variable_and_its_slot_are_not_trained_in_one_step(gate: Any, slot_first: bool) -> None:
    v = Variable(np.zeros(2, np.float32), name="v")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    optimizer.apply_gradients([(np.ones(2, np.float32), v)])
    slot = optimizer.get_slot(v, "momentum")
    assert slot is not None
    both = [slot, v] if slot_first else [v, slot]

    def loss() -> Any:
        first, second = (np.sum(each * 2) for each in both)
        return first + second

    with pytest.raises(ValueError, match="written twice"):
        optimizer.minimize(loss, var_list=both, gate_gradients=gate)
