"""Restored slots that wait for their variable, and the variable that comes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import gpuopt
from gpuopt import Saver, Variable


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
