"""Operations with states in which one thing was changed: refused by name, or as good as before."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import gpuopt
from fuzzing.saves import Files
from fuzzing.world import World
from gpuopt.checkpoint.checkpoint_writer import write_checkpoint
from gpuopt.checkpoint.contents import flattened

# Of two slots or more, as then each variable needs all of them.
KINDS = ["Adam", "Adadelta", "RMSProp", "Ftrl", "AdagradDA"]
SQUARES = {
    "Adam": "v",
    "Adadelta": "accum_update",
    "RMSProp": "rms",
    "Ftrl": "accum",
    "AdagradDA": "gradient_squared_accumulator",
}


class Change(NamedTuple):
    """One thing that is changed.

    Attributes:
        apply: Changes a state of an optimizer of a kind, of which it gets a slot's name.
        words: In the error; None if the state is as good as before.
        needs: What the state must have: "slots" or "non_slots".
    """

    apply: Callable[[World, str, Any, str], None]
    words: str | None
    needs: str = "slots"


def _set(world: World, state: Any, slot: str, change: Callable[[np.ndarray], Any]) -> None:
    table = state["slots"][slot]
    table["a"] = change(table["a"])


def _lower(world: World, kind: str, state: Any, _: str) -> None:
    value = state["slots"][SQUARES[kind]]["a"]
    value[world.rng.integers(len(value))] = world.choose([-1e-30, -1.0, -np.inf])


def _set_power(world: World, kind: str, state: Any, _: str) -> None:
    power = world.choose(["beta1_power", "beta2_power"])
    state["non_slots"][power] = np.float32(world.choose([-0.5, 1.5, np.nan, np.inf]))


def _retype_power(world: World, kind: str, state: Any, _: str) -> None:
    power = world.choose(["beta1_power", "beta2_power"])
    state["non_slots"][power] = world.choose([np.float64(0.5), np.ones(1, np.float32)])


def _reverse(world: World, kind: str, state: Any, _: str) -> None:
    for table in (*state["slots"].values(), state["slots"], state["non_slots"], state):
        for key in list(table)[::-1]:
            table[key] = table.pop(key)


def _other(world: World, kind: str, state: Any, _: str) -> None:
    others = [each for each in KINDS if each != kind]
    state.update(_trained(world, world.choose(others), "cpu")[1])


CHANGES: dict[str, Change] = {
    "a slot of one variable is missing": Change(
        lambda world, kind, state, slot: state["slots"][slot].pop("a"), '"a"'
    ),
    "a slot is missing": Change(lambda w, kind, state, slot: state["slots"].pop(slot), '"a"|"b"'),
    "a slot has another name": Change(
        lambda w, kind, state, slot: state["slots"].update(more=state["slots"].pop(slot)), '"more"'
    ),
    "there is another slot": Change(
        lambda w, kind, state, slot: state["slots"].update(more={"a": np.zeros(3)}), '"more"'
    ),
    "a slot has another dtype": Change(
        lambda w, kind, state, slot: _set(w, state, slot, lambda v: v.astype(np.float64)), '"a"'
    ),
    "a slot has another shape": Change(
        lambda w, kind, state, slot: _set(w, state, slot, lambda v: v[None]), '"a"'
    ),
    "squares are below 0": Change(_lower, '"a" holds numbers from 0'),
    "a variable of the optimizer is missing": Change(
        lambda w, kind, state, slot: state["non_slots"].pop("beta2_power"), "beta2", "non_slots"
    ),
    "a power is none": Change(_set_power, "_power", "non_slots"),
    "a power has another form": Change(_retype_power, "_power", "non_slots"),
    "there is another variable": Change(
        lambda w, kind, state, slot: state["non_slots"].update(more=np.float32(1)), 'has a "more"'
    ),
    "everything is in another order": Change(_reverse, None),
    "it is another optimizer's": Change(_other, 'has a slot "'),
}


def spoiled_state(world: World, files: Files) -> str:
    """Changed states, or checkpoints that hold them, are loaded by a new or an old optimizer."""
    return "; ".join(_load_spoiled(world) for _ in range(4))


def _load_spoiled(world: World) -> str:
    kind, device = world.choose(KINDS), world.choose(world.devices)
    variables, state = _trained(world, kind, device)
    possible = [each for each in CHANGES if CHANGES[each].needs == "slots" or state["non_slots"]]
    name = world.choose(possible)
    spoiled = copy.deepcopy(state)
    words = CHANGES[name].words
    CHANGES[name].apply(world, kind, spoiled, world.choose(list(state["slots"])))
    optimizers = [_new(kind) for _ in range(2)]
    reference, optimizer = optimizers
    reference.load_state_dict(state, variables)
    if world.happens(0.5):
        optimizer.load_state_dict(state, variables)
    how = world.choose(["state", "state to wait", "checkpoint"])
    text = f"{kind} on {device}, {how}: {name}"
    before = str(optimizer.state_dict(variables))
    values = {label: variable.numpy() for label, variable in variables.items()}
    error = _load(world, how, optimizer, spoiled, variables)
    assert (error is None) == (words is None), f"{text}: {error}"
    if words is not None:
        assert any(word in str(error) for word in words.split("|")), f"{text}: {error}"
        assert str(optimizer.state_dict(variables)) == before, text
        for label, variable in variables.items():
            np.testing.assert_array_equal(variable.numpy(), values[label], text)
        optimizer.load_state_dict(state, variables)
    _compare_steps(world, optimizers, variables, text)
    return text


def _trained(world: World, kind: str, device: str) -> tuple[dict[str, Any], Any]:
    variables = {
        label: gpuopt.Variable(world.values((3,), np.float32), name=label, device=device)
        for label in "ab"
    }
    optimizer = _new(kind)
    for _ in range(2):
        pairs = [(world.values((3,), np.float32), each) for each in variables.values()]
        optimizer.apply_gradients(pairs)
    return variables, optimizer.state_dict(variables)


def _new(kind: str) -> Any:
    options: dict[str, Any] = {"learning_rate": 0.5, "name": "spoiled"}
    if kind == "AdagradDA":
        options["global_step"] = gpuopt.Variable(0, name="spoiled steps", trainable=False)
    return getattr(gpuopt, f"{kind}Optimizer")(**options)


def _load(world: World, how: str, optimizer: Any, state: Any, variables: Any) -> Any:
    """Returns the error, if there is one."""
    try:
        if how == "checkpoint":
            values = {label: variable.numpy() + 1 for label, variable in variables.items()}
            tensors, saved = flattened(values, [(optimizer, state)])
            path = world.folder / "spoiled.safetensors"
            arrays = {name: np.asarray(value) for name, value in tensors.items()}
            write_checkpoint(path, arrays, {"global_step": 0, "optimizers": saved}, time.time_ns())
            saver = gpuopt.Saver(variables, optimizers=[optimizer])
            saver.restore(path)
            for label, variable in variables.items():
                variable.assign(values[label] - 1)
        elif how == "state":
            optimizer.load_state_dict(state, variables)
        else:
            optimizer.load_state_dict(state, {})
            optimizer.load_state_dict(optimizer.state_dict({}), variables)
    except (TypeError, ValueError, gpuopt.CheckpointError) as error:
        return error
    return None


def _compare_steps(world: World, optimizers: list[Any], variables: Any, text: str) -> None:
    gradients = [world.values((3,), np.float32) for _ in variables]
    start = [variable.numpy() for variable in variables.values()]
    results = []
    for optimizer in optimizers:
        for variable, value in zip(variables.values(), start, strict=True):
            variable.assign(value)
        optimizer.apply_gradients(list(zip(gradients, variables.values(), strict=True)))
        results.append([variable.numpy() for variable in variables.values()])
    np.testing.assert_equal(results[1], results[0], text)
