"""Gradients are added to sums as these are measured: to the bits of adding them before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher

from gpuopt.backends import Target
from gpuopt.backends.clips import NUM_COLUMNS, AddedGradients, ClipForm, ClipLimits, DenseGradients
from gpuopt.backends.cpu.clips import CpuClips
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK
from gpuopt.backends.loss_scaling import Decision, LastBad
from gpuopt.device import Device
from gpuopt.optimizers.lars import lars
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState

pytestmark = [pytest.mark.value, pytest.mark.emulator]

SANITIZER = os.environ.get("GPUOPT_EMULATOR_SANITIZE")
FLOAT, DOUBLE, HALF, BRAIN = (
    np.dtype(each) for each in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
)
# The types of a gradient, and of its sum.
TYPES = [(FLOAT, FLOAT), (DOUBLE, DOUBLE), (HALF, FLOAT), (BRAIN, FLOAT)]
if SANITIZER == "thread":
    TYPES = TYPES[:1]
SIZES = [1, 0, 77, CLIP_CHUNK + 9]
if not SANITIZER:
    SIZES += [CLIP_CHUNK, 3 * CLIP_CHUNK - 5]
LIMITS = ClipLimits([np.float32(2)], ClipForm.TENSORFLOW, False)
DIVISOR, FACTOR = 3.0, np.float32(1) / np.float32(24)
CPU = CpuClips(CpuLimits())


def launchers() -> Iterator[EmulatorLauncher]:
    """Of other orders of blocks and threads, and other numbers of multiprocessors."""
    for seed, multiprocessors in ((0, 4), (3, 1), (7, 9)):
        launcher = EmulatorLauncher(seed=seed)
        launcher.num_multiprocessors = multiprocessors
        yield launcher


def backend_on(launcher: EmulatorLauncher | None = None) -> CudaBackend:
    return CudaBackend(Device("gpu", 0), launcher or EmulatorLauncher())


def shifted(array: np.ndarray, shift: int) -> np.ndarray:
    """Returns a copy that does not begin at the address of a pack."""
    copy = np.zeros(array.size + 8, array.dtype)[shift : shift + array.size]
    copy[...] = array
    return copy


def expected_sum(total: np.ndarray, gradient: np.ndarray, begins: bool, factor: Any) -> np.ndarray:
    """Adds as accumulation is documented: each operation rounds to the sum's type."""
    real = total.dtype.type
    given = gradient.astype(real)
    if factor is not None:
        given = given * real(factor)
    return (given if begins else total + given) / real(DIVISOR)


def added_to(
    backend: CudaBackend,
    sums: list[Any],
    gradients: list[Any],
    begins: bool = False,
    factor: Any = None,
    divisor: float = DIVISOR,
) -> DenseGradients:
    """Returns sums of one norm, which lack these gradients."""
    plan = backend.plan_dense([Target(each, []) for each in sums])
    factors = None if factor is None else np.full((1, NUM_COLUMNS), factor, np.float64)
    added = AddedGradients(plan, gradients, begins, factors, divisor)
    return DenseGradients(sums, [0] * len(sums), added=added)


@pytest.mark.parametrize("begins", [False, True], ids=["going on", "beginning"])
@pytest.mark.parametrize("factor", [None, FACTOR], ids=["as it is", "scaled"])
@pytest.mark.parametrize(("given", "wide"), TYPES, ids=str)
def test_sums_and_their_norm_have_the_bits_of_adding_before(
    given: Any, wide: Any, factor: Any, begins: bool
) -> None:
    rng = np.random.default_rng(1)
    totals = [rng.normal(size=size).astype(wide) for size in SIZES]
    gradients = [rng.normal(size=size).astype(given) for size in SIZES]
    if begins:  # what was there before
        for total in totals:
            total[...] = np.nan
    exact = [
        expected_sum(total, gradient, begins, factor)
        for total, gradient in zip(totals, gradients, strict=True)
    ]
    host = CPU.measure([DenseGradients(exact, [0] * len(SIZES))], [], LIMITS)
    for shift, launcher in enumerate(launchers()):
        backend = backend_on(launcher)
        sums = [shifted(each, shift) for each in totals]
        mine = [shifted(each, 2 * shift) for each in gradients]
        dense = added_to(backend, sums, mine, begins, factor)
        before = launcher.launches
        factors = backend.clips.measure([dense], [], LIMITS)
        assert launcher.launches == before + 1
        for got, total in zip(sums, exact, strict=True):
            assert got.tobytes() == total.tobytes()
        for got, gradient in zip(mine, gradients, strict=True):
            assert got.tobytes() == gradient.tobytes()
        np.testing.assert_array_equal(factors, host)


def test_one_sum_alone_and_a_gradient_with_strides() -> None:
    total, gradient = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 2], [3, 4], [5, 6]]).T
    backend = backend_on()
    dense = added_to(backend, [total], [gradient], divisor=2.0)
    factors = backend.clips.measure([dense], [], LIMITS)
    assert total.tolist() == [[1, 2.5, 4], [3, 4.5, 6]]
    assert factors[0, 0] == np.sum(total.astype(np.float64) ** 2)


def test_a_sum_is_added_to_once_where_floats_cannot_hold_its_squares() -> None:
    rng = np.random.default_rng(2)
    size = CLIP_CHUNK + 77
    scale = np.repeat(2.0 ** np.array([100, 40]), [CLIP_CHUNK, 77])
    total, gradient = ((rng.normal(size=size) * scale).astype(FLOAT) for _ in range(2))
    exact = expected_sum(total, gradient, False, None)
    limits = LIMITS._replace(unscale=2.0**-90)
    backend = backend_on()
    factors = backend.clips.measure([added_to(backend, [total], [gradient])], [], limits)
    assert total.tobytes() == exact.tobytes()
    np.testing.assert_array_equal(factors, CPU.measure([DenseGradients([exact], [0])], [], limits))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_gpu_decides_by_sums_and_names_the_first_that_is_not_finite(bad: float) -> None:
    backend = backend_on(EmulatorLauncher(xp=fake_cupy))
    sums = [fake_cupy.ones(size, FLOAT) for size in (5, 70, 9)]
    gradients = [each.copy() for each in sums]
    gradients[1][66] = bad
    if bad == 3e38:  # what is finite alone, and not together
        sums[1][66] = bad
    before = backend.loss_scalings.new(ScaleState(np.float32(8)))
    decision = Decision(ScaleRule(), None, before, 0, 1)
    dense = added_to(backend, sums, gradients, divisor=1.0)._replace(numbers=[4, 6, 7])
    limits = LIMITS._replace(unscale=1 / 8)
    decided = backend.loss_scalings.decide([dense], [], limits, decision)
    state, num_made, last_bad = backend.loss_scalings.state(decided.after)
    assert (num_made, state.num_skipped, last_bad) == (0, 1, LastBad(1, 6))
    assert fake_cupy.asnumpy(sums[0]).tolist() == [2] * 5


@pytest.mark.parametrize(("given", "wide"), TYPES, ids=str)
def test_what_a_rule_sums_is_of_the_sums(given: Any, wide: Any) -> None:
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=size).astype(wide) for size in SIZES]
    totals = [rng.normal(size=size).astype(wide) for size in SIZES]
    gradients = [rng.normal(size=size).astype(given) for size in SIZES]
    bounds = [0.5 if number % 2 else np.inf for number in range(len(SIZES))]
    exact = [
        expected_sum(total, gradient, False, None)
        for total, gradient in zip(totals, gradients, strict=True)
    ]
    found = set()
    for shift, launcher in enumerate(launchers()):
        backend = backend_on(launcher)
        targets = [Target(shifted(each, shift), [np.zeros_like(each)]) for each in weights]
        plan = backend.plan_dense(targets)

        sums = [shifted(each, shift) for each in totals]
        late = added_to(backend, sums, [shifted(each, shift) for each in gradients])
        for dense in (late, DenseGradients(exact, [0] * len(SIZES))):
            inputs = backend.clips.inputs(lars, plan, bounds)
            assert inputs is not None
            factors = backend.clips.measure([dense._replace(inputs=inputs)], [], LIMITS)
            found.add((factors.tobytes(), inputs.sums.tobytes()))
        assert [each.tobytes() for each in sums] == [each.tobytes() for each in exact]
    assert len(found) == 1
