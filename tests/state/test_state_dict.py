"""Restored slots that wait for their variable, and the variable that comes."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuopt
from gpuopt import Saver, Variable
from gpuopt.state import state as state_module


def waiting_for(shape: Any, dtype: Any = np.float32) -> tuple[gpuopt.MomentumOptimizer, Any]:
    """Returns an optimizer in which a momentum waits for a "w", and an empty state."""
    saved = gpuopt.MomentumOptimizer(1.0, 0.9).state_dict({})
    empty = gpuopt.MomentumOptimizer(1.0, 0.9).state_dict({})
    saved["slots"] = {"momentum": {"w": np.full(shape, 3, dtype)}}
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    optimizer.load_state_dict(saved, {})
    return optimizer, empty


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        (4, np.float32, r'slot "momentum" of "w" has shape \(7,\); the saved value has shape'),
        (7, np.float64, 'slot "momentum" of "w" has dtype float32; the saved value has dtype'),
    ],
)
def test_a_waiting_slot_must_fit_the_variable_that_a_later_load_names(
    shape: Any, dtype: Any, words: str
) -> None:
    optimizer, empty = waiting_for(shape, dtype)
    other = Variable(np.zeros(2, np.float32), name="other")
    w = Variable(np.zeros(7, np.float32), name="w")
    before = optimizer.state_dict({"w": w, "other": other})
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(empty, {"other": other, "w": w})
    assert optimizer.variables() == []
    after = optimizer.state_dict({"w": w, "other": other})
    assert str(after) == str(before)
    with pytest.raises(ValueError, match=words):
        optimizer.apply_gradients([(np.ones(7, np.float32), w)])


def test_a_waiting_slot_that_fits_is_given_to_the_variable() -> None:
    optimizer, empty = waiting_for(7)
    w = Variable(np.zeros(7, np.float32), name="w")
    optimizer.load_state_dict(empty, {"w": w})
    optimizer.apply_gradients([(np.ones(7, np.float32), w)])
    assert w.numpy() == pytest.approx(-(3 * 0.9 + 1))


def test_a_waiting_slot_is_replaced_before_it_is_compared() -> None:
    optimizer, newer = waiting_for(4)
    newer["slots"] = {"momentum": {"w": np.full(7, 5, np.float32)}}
    w = Variable(np.zeros(7, np.float32), name="w")
    optimizer.load_state_dict(newer, {"w": w})
    assert optimizer.get_slot(w, "momentum").numpy() == pytest.approx(5)


def test_attach_looks_at_all_waiting_slots_first(tmp_path: Path) -> None:
    kept, a, b = (Variable(np.ones(3, np.float32), name=name) for name in ("kept", "a", "b"))
    first = gpuopt.MomentumOptimizer(0.5, 0.9)
    first.apply_gradients([(np.ones(3, np.float32), v) for v in (a, b)])
    path = Saver([kept, a, b], optimizers=[first]).save(tmp_path / "model")
    del a, b, first
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    saver = Saver([kept], optimizers=[optimizer])
    saver.restore(path, deferred=True)
    state = optimizer.state_dict({})
    state["slots"]["momentum"]["b"] = np.ones(4, np.float32)
    optimizer.load_state_dict(state, {})
    a, b = (Variable(np.zeros(3, np.float32), name=name) for name in "ab")
    with pytest.raises(ValueError, match='slot "momentum" of "b" has shape'):
        saver.attach([a, b])
    assert not a.numpy().any()
    assert optimizer.variables() == []
    late = Variable(np.zeros(3, np.float32), name="late")
    optimizer.apply_gradients([(np.ones(3, np.float32), late)])
    with pytest.raises(ValueError, match='slot "momentum" of "b" has shape'):
        saver.attach({"a": a, "b": late})
    assert not a.numpy().any()
    assert optimizer.variables() == [optimizer.get_slot(late, "momentum")]
    state["slots"]["momentum"]["b"] = np.full(3, 5, np.float32)
    optimizer.load_state_dict(state, {})
    saver.attach([a, b])
    assert a.numpy() == pytest.approx(0.5)
    assert optimizer.get_slot(b, "momentum").numpy() == pytest.approx(5)


def test_a_variable_that_is_just_being_dropped_belongs_to_no_state(tmp_path: Path) -> None:
    kept, dropped = (Variable(np.zeros(2), name=name) for name in ("kept", "dropped"))
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    optimizer.apply_gradients([(np.ones(2), kept), (np.ones(2), dropped)])
    saver = Saver()
    states: list[Any] = []
    saved: list[str] = []

    def at_the_end(_: Any) -> None:
        # As from another thread: the variable is gone, and its slots are still there.
        assert len(optimizer.variables()) == 2
        states.append(optimizer.state_dict())
        saved.append(saver.save(tmp_path / "model"))

    end = weakref.ref(dropped, at_the_end)
    del dropped
    assert end() is None
    [state], [path] = states, saved
    assert list(state["slots"]["momentum"]) == ["kept"]
    assert set(load_file(path)) == {"kept", "kept/Momentum"}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_slots_of_an_interrupted_first_step_are_left_out(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update has used them; a state with some of them alone could not be loaded."""

    def interrupted(*arguments: Any) -> Any:
        nonlocal number
        number -= 1
        if number == 0:
            raise KeyboardInterrupt
        return create(*arguments)

    create = state_module.new_slot_variable
    old = Variable(np.zeros(3), name="old")
    w, b = Variable(np.zeros(3), name="w"), Variable(np.zeros(2), name="b")
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.apply_gradients([(np.ones(3), old)])
    pairs = [(np.ones(3), w), (np.ones(2), b)]
    with monkeypatch.context() as patch:
        patch.setattr(state_module, "new_slot_variable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.apply_gradients(pairs)
    state = optimizer.state_dict()
    assert {*state["slots"]["m"]} == {*state["slots"]["v"]} == {"old"}
    optimizer.load_state_dict(state)
    saver = Saver([old, w, b], optimizers=[optimizer])
    saver.restore(saver.save(tmp_path / "m"))
    optimizer.apply_gradients(pairs)
    saver.restore(saver.save(tmp_path / "m"))
    assert {*optimizer.state_dict()["slots"]["v"]} == {"old", "w", "b"}


def test_slots_and_averages_of_a_variable_that_is_gone_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the moment in which another thread drops the variable."""
    w, other = (Variable(np.zeros(3), name=name) for name in ("w", "other"))
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    average = gpuopt.ExponentialMovingAverage(0.5)
    optimizer.apply_gradients([(np.ones(3), w), (np.ones(3), other)])
    average.apply([w, other])
    kept = [optimizer.get_slot(w, "momentum"), average.average(w)]
    saver = Saver()
    del w
    path = saver.save(tmp_path / "m")
    assert set(load_file(path)) == {
        "other",
        "other/Momentum",
        "other/ExponentialMovingAverage",
    }
    assert caplog.messages == [
        'neither saved nor restored: "w/ExponentialMovingAverage", "w/Momentum", of variables '
        "that are gone; give them to the Saver by name"
    ]
    saver.restore(path)
    path = Saver(kept, optimizers=[]).save(tmp_path / "m")
    assert set(load_file(path)) == {"w/Momentum", "w/ExponentialMovingAverage"}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"non_slots": None}, TypeError, "holds values by name, got None"),
        ({"non_slots": np.ones(2)}, TypeError, "holds values by name, got array"),
        ({"non_slots": {1: 2.0}}, TypeError, "holds values by name"),
        ({None: 3}, TypeError, "is a dictionary with .* got .*None"),
        ({"format": np.ones(2)}, ValueError, "has format array"),
    ],
)
def test_a_state_of_another_form_is_refused_by_every_optimizer(
    change: dict[Any, Any], error: type[Exception], words: str
) -> None:
    adam, variable = gpuopt.AdamOptimizer(0.1), Variable(np.ones(2))
    scaled = gpuopt.LossScaleOptimizer(gpuopt.AdamOptimizer(), gpuopt.FixedLossScaleManager(8.0))
    for optimizer in (adam, scaled):
        optimizer.apply_gradients([(np.ones(2), variable)])
        state = optimizer.state_dict()
        with pytest.raises(error, match=words):
            optimizer.load_state_dict({**state, **change})
        without: Any = {name: value for name, value in state.items() if name != "non_slots"}
        with pytest.raises(TypeError, match="an optimizer's state is a dictionary with"):
            optimizer.load_state_dict(without)


@pytest.mark.parametrize("of", [Variable.value, lambda slot: slot, lambda slot: slot.value()[::1]])
def test_slots_may_change_places(of: Any) -> None:
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    variables = {name: Variable(np.ones(3), name=name) for name in "ab"}
    optimizer.apply_gradients(
        [(np.full(3, 1.0), variables["a"]), (np.full(3, 2.0), variables["b"])]
    )
    slots = {name: optimizer.get_slot(each, "momentum") for name, each in variables.items()}
    state = optimizer.state_dict()
    state["slots"]["momentum"] = {"a": of(slots["b"]), "b": of(slots["a"])}
    optimizer.load_state_dict(state)
    assert [slots[name].numpy()[0] for name in "ab"] == [2, 1]


def test_variables_of_a_state_are_given_by_name() -> None:
    weights = Variable(np.ones(3, np.float32), name="weights")
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer.apply_gradients([(np.ones(3, np.float32), weights)])
    state = optimizer.state_dict()
    for call in (optimizer.state_dict, partial(optimizer.load_state_dict, state)):
        with pytest.raises(TypeError, match=r"variables must be a mapping .* got list"):
            call([weights])


def test_a_state_of_after_a_refused_first_step_is_one_of_before_all_steps() -> None:
    rates = iter([ValueError("no rate yet"), 0.5])

    def rate() -> float:
        found = next(rates)
        if isinstance(found, Exception):
            raise found
        return found

    w, gradient = Variable(np.ones(3), name="w"), np.ones(3)
    optimizer = gpuopt.MomentumOptimizer(rate, 0.9)
    with pytest.raises(ValueError, match="no rate yet"):
        optimizer.apply_gradients([(gradient, w)])
    state = optimizer.state_dict({"w": w})
    optimizer.apply_gradients([(gradient, w)])
    optimizer.load_state_dict(state, {"w": w})
    assert optimizer.get_slot(w, "momentum") is None
