"""Raw arrays as variables.

Whose memory they are on, and what goes with it, is in test_memory_owner.py, and at random in
test_raw_arrays_properties.py.
"""

from __future__ import annotations

import gc
import itertools
import os
import tracemalloc
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable
from gpuopt.variables import identity, names

FULL = bool(os.environ.get("GPUOPT_FULL"))
# New arrays, step after step, are what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:in three steps in a row, all arrays were new")


def momentum() -> gpuopt.MomentumOptimizer:
    return gpuopt.MomentumOptimizer(0.1, 0.9)


def test_many_short_lived_arrays_leave_nothing_behind() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    kept = np.zeros(2, np.float32)
    gradient = np.ones(2, np.float32)
    optimizer.apply_gradients([(gradient, kept)])
    gc.collect()
    names._fix_all()
    before = (len(identity._by_memory), len(names._named), len(gpuopt.global_variables()))
    for _ in range(10_000 if FULL else 1_000):
        optimizer.apply_gradients([(gradient, np.zeros(2, np.float32)), (gradient, kept)])
    gc.collect()
    after = (len(identity._by_memory), len(names._named), len(gpuopt.global_variables()))
    assert after == before
    assert not names._not_fixed
    assert len(optimizer.variables()) == 4  # of `kept`, and the powers of beta


@pytest.mark.parametrize(
    "layout",
    [
        lambda full: full[::2],
        lambda full: full[::-1],
        lambda full: full.reshape(4, 6)[:, 1:4],
        lambda full: full.reshape(4, 6).T,
        lambda full: full.reshape(2, 3, 4)[:, ::-1, 1::2],
        lambda full: full.view(np.uint8)[2:-2].view(np.float32),  # misaligned
    ],
)
def test_strided_and_misaligned_arrays_are_updated_in_place(layout: Any) -> None:
    rng = np.random.default_rng(0)
    full = rng.normal(size=24).astype(np.float32)
    w = layout(full)
    before = full.view(np.uint8).copy()
    reference = Variable(w)
    gradient = rng.normal(size=w.shape).astype(np.float32)
    for target in (w, reference):
        optimizer = gpuopt.AdamOptimizer(0.1)
        for given in (gradient, gpuopt.IndexedSlices(gradient[[1, 0]], [1, 0]), gradient):
            optimizer.apply_gradients([(given, target)])
    assert np.array_equal(w, reference.numpy())
    touched = np.zeros(24, np.float32)
    layout(touched)[...] = np.uint32(0x01010101).view(np.float32)
    outside = touched.view(np.uint8) == 0
    assert np.array_equal(full.view(np.uint8)[outside], before[outside])


def test_read_only_and_immutable_values_are_refused_with_a_reason() -> None:
    for value, words in [
        (np.broadcast_to(np.float32(1), 3), "read-only"),
        (np.frombuffer(b"\0" * 12, np.float32), "read-only"),
        (np.float32(1), "expected a Variable or an array"),
        ([1.0], "expected a Variable or an array, got list"),
        (np.ma.masked_array(np.ones(3, np.float32)), "the variable is a masked array"),
    ]:
        with pytest.raises((ValueError, TypeError)) as raised:
            momentum().apply_gradients([(np.ones(3, np.float32), value)])
        assert words in str(raised.value)
        assert "grads_and_vars[0]" in str(raised.value)


def use_everything(optimizers: list[Any], average: Any) -> None:
    raw, view = np.zeros(4, np.float32), np.zeros(8, np.float32)[2:6]
    adopted = Variable(np.zeros(8, np.float32)[2:6], copy=False)
    gradient = np.ones(4, np.float32)
    for optimizer in optimizers:
        optimizer.apply_gradients([(gradient, raw), (gradient, view), (gradient, adopted)])
        assert optimizer.get_slot(raw, "momentum") is not adopted
    rows = gpuopt.IndexedSlices(gradient[:1], [0])
    optimizers[0].apply_gradients([(rows, raw)], global_step=np.zeros((), np.int64))
    average.apply([raw, view, adopted])
    state = optimizers[1].state_dict({"raw": raw, "view": view, "adopted": adopted})
    optimizers[1].load_state_dict(state, {"raw": raw, "view": view, "adopted": adopted})
    gpuopt.Saver({"raw": raw, "view": view})


def test_short_lived_arrays_leave_no_bytes_behind() -> None:
    optimizers: list[Any] = [
        gpuopt.MomentumOptimizer(0.1, 0.9),
        gpuopt.AdamOptimizer(0.1),
        gpuopt.GradientDescentOptimizer(0.1),
    ]
    average = gpuopt.ExponentialMovingAverage(0.9)

    def traced_after(uses: int) -> int:
        for _ in range(uses):
            use_everything(optimizers, average)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    uses, stretches = (50, 14) if FULL else (25, 14)
    tracemalloc.start()
    try:
        traced = [traced_after(uses) for _ in range(stretches)]
    finally:
        tracemalloc.stop()
    # Stocks of small pieces, numpy's and Python's own, grow in one stretch or another; what is left
    # of each use grows in all of them, and a weak reference, say, takes 72 bytes.
    growth = [after - before for before, after in itertools.pairwise(traced)]
    assert min(growth) < uses * 72, growth
    assert all(len(optimizer.variables()) <= 2 for optimizer in optimizers)


def test_slots_of_a_variable_on_a_view_go_with_the_variable() -> None:
    memory = np.zeros(8, np.float32)
    optimizer = momentum()
    for _ in range(3):
        variable = Variable(memory[2:6], copy=False)
        optimizer.apply_gradients([(np.ones(4, np.float32), variable)])
        assert len(optimizer.variables()) == 1
    del variable
    assert optimizer.variables() == []
