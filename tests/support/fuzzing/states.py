"""Operations with optimizers of their own, whose state is kept, given on, or refused by name."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

import gpuopt
from fuzzing.saves import Files
from fuzzing.world import World


def restored_by_order(world: World, files: Files) -> str:
    """Two optimizers of one name go on with their own state, or their next step is refused."""
    for is_swapped in (False, True):
        _restore_by_order(world, is_swapped)
    return "optimizers of one name restored in their order, and in another"


def _restore_by_order(world: World, is_swapped: bool) -> None:
    device = world.choose(world.devices)
    variables = [gpuopt.Variable(world.values((2,), np.float64), device=device) for _ in range(2)]
    gradients = [world.values((2,), np.float64) for _ in variables]

    def make() -> list[Any]:
        return [gpuopt.MomentumOptimizer(1.0, 0.5, name="one name") for _ in variables]

    def step(optimizers: list[Any]) -> None:
        for optimizer, *pair in zip(optimizers, gradients, variables, strict=True):
            optimizer.apply_gradients([pair])

    optimizers = make()
    step(optimizers)
    saved = gpuopt.Saver(variables, optimizers=optimizers).save(world.folder / "order")
    before = [variable.numpy().copy() for variable in variables]
    optimizers = make()
    in_order = optimizers[::-1] if is_swapped else optimizers
    gpuopt.Saver(variables, optimizers=in_order).restore(saved)
    try:
        step(optimizers)
    except ValueError:
        assert is_swapped, "optimizers of one name in their order were refused"
        for variable, value in zip(variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        return
    assert not is_swapped, "optimizers of one name took each other's state"
    for variable, value, gradient in zip(variables, before, gradients, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value - 1.5 * gradient)


def state_of_torch(world: World, files: Files) -> str:
    """A state of torch's Adam is taken over if its step is one, and refused otherwise."""
    steps = float(world.choose([-5.0, -1.0, 0.5, np.inf, np.nan, 1.0, 7.0]))
    m, v = world.values((2,), np.float32), world.values((2,), np.float32) ** 2
    variable = gpuopt.Variable(np.zeros(2, np.float32), device=world.choose(world.devices))
    settings = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.0, "amsgrad": False}
    state = {
        "state": {0: {"step": np.float32(steps), "exp_avg": m, "exp_avg_sq": v}},
        "param_groups": [{**settings, "params": [0]}],
    }
    text = f"torch's state at step {steps}"
    is_right = steps in (1.0, 7.0)
    try:
        optimizer = gpuopt.optimizer_from_torch(state, [variable])
    except ValueError as error:
        if is_right or "which is no count of steps" not in str(error):
            raise
        return f"{text}: refused"
    assert is_right, f"not refused: {text}"
    np.testing.assert_array_equal(optimizer.get_slot(variable, "m").numpy(), m)
    np.testing.assert_array_equal(optimizer.get_slot(variable, "v").numpy(), v)
    return text


def unknown_owner(world: World, files: Files) -> str:
    """Memory whose end nobody can tell gets no slots, unless a Variable stands for it."""
    start = world.values((4,), np.float32)
    gradient = world.values((4,), np.float32)
    memory = bytearray(start.tobytes())
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5, name="unknown")
    for _ in range(2):
        try:
            optimizer.apply_gradients([(gradient, np.frombuffer(memory, np.float32))])
        except ValueError:
            continue
        raise AssertionError("not refused: slots for a bytearray")
    assert memory == start.tobytes()
    variable = gpuopt.Variable(np.frombuffer(memory, np.float32), copy=False)
    for _ in range(2):
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(np.frombuffer(memory, np.float32), start - 2.5 * gradient)
    return "a bytearray, refused and adopted"


def state_read_while_dropped(world: World, files: Files) -> str:
    """A state is read at the moment when one of the variables goes: it holds the others'."""
    device = world.choose(world.devices)
    kept, dropped = (
        gpuopt.Variable(np.zeros(2), name="kept or dropped", device=device) for _ in range(2)
    )
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5, name="dropping")
    optimizer.apply_gradients([(np.ones(2), kept), (np.ones(2), dropped)])
    states: list[Any] = []
    end = weakref.ref(dropped, lambda _: states.append(optimizer.state_dict()))
    del dropped
    assert end() is None
    [state] = states
    assert list(state["slots"]["momentum"]) == [kept.name]
    return "a state read while a variable is dropped"
