"""An optimizer's state while threads use it."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from typing import Any

import numpy as np
import pytest
from other_thread import repeated

import gpuopt
from gpuopt import Variable

pytestmark = pytest.mark.internal


def test_the_version_is_read_while_another_thread_makes_tables() -> None:
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)

    def read() -> None:
        assert optimizer.state.version.number == 0

    for number in range(200):
        optimizer.state.table(f"first {number}")
    end = time.monotonic() + 1
    with repeated(read, threads=2, alternate=True):
        for number in range(3000):
            optimizer.state.table(f"later {number}")
            if time.monotonic() > end:
                break


def test_the_version_grows_with_a_slot_replaced_or_removed_in_any_table() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    w = gpuopt.Variable([1.0], name="w")
    optimizer.apply_gradients([([1.0], w)])
    seen = [optimizer.state.version.number]
    for name in ("m", "v"):
        optimizer._slot_dict(name)[w.identity] = gpuopt.Variable([0.0])
        seen.append(optimizer.state.version.number)
        del optimizer._slot_dict(name)[w.identity]
        seen.append(optimizer.state.version.number)
        optimizer._slot_dict(name)[w.identity] = gpuopt.Variable([0.0])  # a new one
        assert optimizer.state.version.number == seen[-1]
    assert seen == [0, 1, 2, 3, 4]


def test_a_listing_of_slots_is_never_open_while_other_code_runs() -> None:
    """In a child that is forked in the middle of one, slots would outlive their variables."""
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    w = gpuopt.Variable(np.zeros(3), name="w")
    optimizer.apply_gradients([(np.ones(3), w)])
    slots = optimizer._slot_dict("momentum")._slots
    is_open = []

    def look(frame: Any, event: str, argument: Any) -> Any:
        is_open.append(bool(getattr(slots, "_iterating", False)))
        return look

    sys.settrace(look)
    try:
        optimizer.variables()
        optimizer.state_dict()
    finally:
        sys.settrace(None)
    assert len(is_open) > 20
    assert not any(is_open)


def _restored(w: Variable) -> Any:
    first, second = (gpuopt.MomentumOptimizer(0.1, 0.5) for _ in range(2))
    first.apply_gradients([(np.ones(3, np.float32), w)])
    second.load_state_dict(first.state_dict({"w": w}), {"w": w})
    return second, second.get_slot(w, "momentum")


def _accumulated(w: Variable) -> Any:
    optimizer = gpuopt.GradientAccumulationOptimizer(gpuopt.MomentumOptimizer(0.1, 0.5), 2)
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    return optimizer, optimizer.owner_of_state.state.slot(w, "gradient_sum")


@pytest.mark.parametrize("make", [_restored, _accumulated])
def test_a_slot_that_is_made_outside_of_a_step_goes_with_its_variable(make: Any) -> None:
    w = Variable(np.ones(3, np.float32))
    optimizer, slot = make(w)
    gone = weakref.ref(slot)
    del slot, w
    gc.collect()
    assert gone() is None
    assert optimizer is not None
