"""Operations with losses of their own, whose gradients are known."""

from __future__ import annotations

import itertools
from typing import Any

import autograd
import fake_cupy
import numpy as np
from autograd_special import logsumexp
from fake_cupy import host_memory

import gpuopt
from fuzzing.saves import Files
from fuzzing.world import World, on, put
from gpuopt.autodiff import array_modules, tracing

if not array_modules.is_array_type(fake_cupy.ndarray):
    tracing.add_array_type(fake_cupy.ndarray, fake_cupy)

GATES = [gpuopt.Optimizer.GATE_NONE, gpuopt.Optimizer.GATE_OP]


def gates(world: World, files: Files) -> str:
    """A gradient is another variable's own memory: it counts as it was before the step."""
    old_a, old_b, factor = (world.values((4,), np.float64) for _ in range(3))
    device = world.choose(world.devices)
    hows = ["storage", "reversed", "given", *(["buffer", "lent"] if device == "cpu" else [])]
    factors = put(factor, device)
    for how, a_first, gate in itertools.product(hows, [True, False], GATES):
        memory = old_a.copy()
        if how == "lent":
            a = gpuopt.Variable(np.frombuffer(memoryview(memory), np.float64), copy=False)
        else:
            a = gpuopt.Variable(memory, device=device)
        b = gpuopt.Variable(old_b, device=device)

        def loss(
            a: Any = a, b: Any = b, memory: Any = memory, how: str = how, a_first: bool = a_first
        ) -> Any:
            constant = memory if how == "lent" else a.storage
            if how == "reversed":
                constant = constant[::-1]
            elif how == "buffer":
                constant = np.frombuffer(constant.data, np.float64)
            of_a, of_b = np.sum(a * factors), np.sum((b * 1.0) * constant)
            return of_a + of_b if a_first else of_b + of_a

        given = gpuopt.with_gradients(lambda a=a, b=b: (0.0, {a: b.value(), b: a.value()}))
        optimizer = gpuopt.GradientDescentOptimizer(1.0, name="gates")
        loss = given if how == "given" else loss
        with on(device):
            optimizer.minimize(loss, var_list=[a, b], gate_gradients=gate)
        expected = old_a - (old_b if how == "given" else factor)
        np.testing.assert_array_equal(a.numpy(), expected, f"gate {gate}, a, {how}")
        expected = old_b - (old_a[::-1] if how == "reversed" else old_a)
        np.testing.assert_array_equal(b.numpy(), expected, f"gate {gate}, b, {how}")
    return "gates, where a gradient is another variable's memory"


def written_in_a_loss(world: World, files: Files) -> str:
    """A variable that a loss has computed with is not written in it; before, it may be."""
    old, new, factor = (world.values((3,), np.float32) for _ in range(3))
    device = world.choose(world.devices)
    w, other = (gpuopt.Variable(value, device=device) for value in (old, factor))
    how = world.choose(["assign", "+=", "item", "step"])
    is_before = world.happens(0.4)

    def write() -> None:
        variable = w
        if how == "assign":
            variable.assign(new)
        elif how == "+=":
            variable += put(new - old, device)
        elif how == "item":
            variable[...] = put(new, device)
        else:
            optimizer = gpuopt.GradientDescentOptimizer(1.0, name="inner")
            optimizer.apply_gradients([(old - new, variable)])

    def loss() -> Any:
        if is_before:
            write()
        y = np.sum(w * other)
        if not is_before:
            write()
        return y

    optimizer = gpuopt.GradientDescentOptimizer(1.0, name="outer")
    variables = [w, other] if world.happens(0.5) else [other]
    moment = "before" if is_before else "after"
    text = f"{how} on {device} in a loss {moment} it computes with the variable"
    try:
        with on(device):
            pairs = optimizer.compute_gradients(loss, variables)
    except RuntimeError:
        assert not is_before, text
        np.testing.assert_array_equal(w.numpy(), old, text)
        return f"{text}: refused"
    assert is_before, f"not refused: {text}"
    by_variable = {id(variable): gradient for gradient, variable in pairs}
    np.testing.assert_array_equal(host_memory(by_variable[id(other)]), new, text)
    return text


def reduction_with_where(world: World, files: Files) -> str:
    """Only the elements that a sum or a mean is taken of have a derivative."""
    shape = (3, 4)
    w = gpuopt.Variable(world.values(shape, np.float64))
    factor, mask = world.values(shape, np.float64), world.rng.random(shape) < 0.5
    mask[0], mask[:, 0] = True, True
    axis = world.choose([None, 0, 1, (0, 1)])
    reduce = world.choose([np.sum, np.mean])
    optimizer = gpuopt.GradientDescentOptimizer(1.0, name="where")
    [(gradient, _)] = optimizer.compute_gradients(
        lambda: np.sum(reduce(w * factor, axis=axis, where=mask)), [w]
    )
    count = mask.sum(axis=axis, keepdims=True) if reduce is np.mean else 1
    text = f"{reduce.__name__} over axis {axis} with where="
    np.testing.assert_allclose(gradient, factor * mask / count, err_msg=text)
    return text


def logsumexp_is_autograds(world: World, files: Files) -> str:
    """After a loss of ours, autograd's functions are as they were for others."""
    reduction_with_where(world, files)
    x, weights = world.values((4,), np.float64), world.rng.random(4)
    exponentials = weights * np.exp(x)
    np.testing.assert_allclose(logsumexp(x, b=weights), np.log(exponentials.sum()))
    gradient = autograd.grad(lambda x: logsumexp(x, b=weights))(x)
    np.testing.assert_allclose(gradient, exponentials / exponentials.sum())
    assert logsumexp(np.full(2, -np.inf)) == -np.inf
    return "autograd's logsumexp"
