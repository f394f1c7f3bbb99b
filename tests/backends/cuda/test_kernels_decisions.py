"""The kernels that decide about scaled steps do what the host's rule says, alone and together."""

from __future__ import annotations

import os
from typing import Any

import fake_cupy
import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher

from gpuopt.backends.clips import ClipForm, ClipLimits, DenseGradients, SparseGradient
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK, MEASURED_ROWS
from gpuopt.backends.loss_scaling import Decision, LastBad
from gpuopt.device import Device
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState, after_step

pytestmark = [pytest.mark.value, pytest.mark.emulator]

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
LIMITS = ClipLimits([np.float32(2), np.float32(np.inf)], ClipForm.TENSORFLOW, False, unscale=0.0)
RULES = [ScaleRule(), ScaleRule(2, 3.0, 2, 0.7), ScaleRule(3, 2.5, 1, 1.0, 2.5)]
# Of dense gradients, of which some are in one launch; and of sparse ones, which are together.
SIZES = [3, CLIP_CHUNK + 9, 1, 40]
NUM_ROWS = [MEASURED_ROWS - 20, 60, 5]


def gradients(rng: np.random.Generator, bad: list[int]) -> tuple[list[Any], list[Any]]:
    """Returns dense and sparse gradients, numbered one after the other, in two norms."""
    dense = [rng.normal(size=size).astype(np.float32) for size in SIZES]
    sparse = [rng.normal(size=(n, 4)).astype(np.float32) for n in NUM_ROWS]
    every = [*dense, *sparse]
    for number in bad:
        array = every[number].reshape(-1)
        array[rng.integers(array.size)] = rng.choice([np.inf, np.nan])
    dense, sparse = ([fake_cupy.asarray(each) for each in some] for some in (dense, sparse))
    lists = [
        DenseGradients(dense[:3], [0, 1, 0], [0, 1, 2]),
        DenseGradients(dense[3:], [1], [3]),
    ]
    slices = [
        SparseGradient(values, fake_cupy.asarray(rng.integers(0, 9, len(values))), 9, 1, number)
        for number, values in enumerate(sparse, len(dense))
    ]
    return lists, slices


@pytest.mark.parametrize("seed", [5] if SANITIZED else range(6))
def test_a_device_decides_as_the_host_does_and_names_the_first_gradient(seed: int) -> None:
    rng = np.random.default_rng(seed)
    backends = [
        CudaBackend(Device("gpu"), EmulatorLauncher(seed=seed + n, xp=fake_cupy)) for n in range(2)
    ]
    home, other = (backend.clips for backend in backends)
    scalings = backends[0].loss_scalings
    rule, accept_after = RULES[seed % 3], (None, 1)[seed % 2]
    expected = ScaleState(np.float32(8))
    alone = together = scalings.new(expected)
    made, last_bad = 0, LastBad(0, 0)
    for step in range(1, 5 if SANITIZED else 15):
        bad = list(rng.choice(7, rng.integers(1, 4))) if rng.random() < 0.5 else []
        dense, sparse = gradients(rng, bad)
        decision = Decision(rule, accept_after, alone, step)
        of_all = home.measure(dense, sparse, LIMITS, decision=decision)
        empty = DenseGradients([fake_cupy.zeros(0, np.float32)], [0], [9])
        sums = [
            home.sums(dense[:1], sparse[2:], 2, decides=True),
            other.sums(dense[1:], sparse[:2], 2, decides=True),
            other.sums([empty], [], 2, decides=True),
        ]
        joined = home.join(sums, LIMITS, decision._replace(before=together))
        taken = other.take(joined, home.memory(joined).copy())
        expected, is_made = after_step(expected, rule, not bad, accept_after)
        made += is_made
        if bad:
            last_bad = LastBad(step, min(bad))
        for decided, at in ((of_all, 0), (joined, 0), (taken, 1)):
            after, found = decided.refused, backends[at].loss_scalings
            assert found.state(after) == (expected, made, last_bad)
            assert bool(after.array[0]) == (not is_made)
            assert found.read(after).values.tolist() == [made, *last_bad]
        factors, same, alike = (fake_cupy.asnumpy(each.factors) for each in (joined, taken, of_all))
        np.testing.assert_array_equal(factors, same)
        if not bad:
            np.testing.assert_allclose(factors, alike, rtol=1e-6)
        alone, together = of_all.refused, joined.refused


def test_refused_rows_of_one_device_leave_the_step_out_and_uncounted() -> None:
    backends = [
        CudaBackend(Device("gpu"), EmulatorLauncher(seed=n, xp=fake_cupy)) for n in range(2)
    ]
    home, other = (backend.clips for backend in backends)
    scalings = backends[0].loss_scalings
    dense, sparse = gradients(np.random.default_rng(1), [2])
    flags = backends[1].row_flags
    flag = flags.new()
    before = ScaleState(np.float32(8), 1, 0, 3, 2)
    for is_set in (True, False):
        flag.array[...] = [int(is_set), 0]
        sums = [
            home.sums(dense, [], 2, decides=True),
            other.sums([], sparse, 2, flag, decides=True),
        ]
        scaling = scalings.new(before)
        after = home.join(sums, LIMITS, Decision(RULES[2], None, scaling, 1)).refused
        state, made, last_bad = scalings.state(after)
        assert after.array[0] == 1
        assert made == 0
        if is_set:
            assert (state, last_bad) == (before, LastBad(0, 0))
        else:
            assert (state.num_skipped, last_bad) == (4, LastBad(1, 2))


def test_after_a_step_that_stops_the_others_none_is_made_or_told_of() -> None:
    rng = np.random.default_rng(3)
    backends = [
        CudaBackend(Device("gpu"), EmulatorLauncher(seed=n, xp=fake_cupy)) for n in range(2)
    ]
    home, other = (backend.clips for backend in backends)
    scalings = backends[0].loss_scalings
    alone = together = scalings.new(ScaleState(np.float32(1)))
    for step, bad in enumerate(([], [], [5], [], [2], []), 1):
        dense, sparse = gradients(rng, bad)
        made, is_stopped = min(step, 2), step >= 3
        decision = Decision(ScaleRule(), None, alone, step, stops=True)
        alone = home.measure(dense, sparse, LIMITS, decision=decision).refused
        sums = [home.sums(dense, [], 2, decides=True), other.sums([], sparse, 2, decides=True)]
        together = home.join(sums, LIMITS, decision._replace(before=together)).refused
        for after in (alone, together):
            assert bool(after.array[0]) == is_stopped
            assert scalings.state(after)[1:] == (
                made,
                LastBad(3, 5) if is_stopped else LastBad(0, 0),
            )
