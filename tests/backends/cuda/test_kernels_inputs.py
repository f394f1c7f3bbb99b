"""Sums over variables and gradients are added up as these are measured, in every type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher
from every_backend import plan_beside

from gpuopt.backends import Target
from gpuopt.backends.backend import compute_type
from gpuopt.backends.clips import ClipForm, ClipLimits, DenseGradients
from gpuopt.backends.cpu.clips import CpuClips
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK
from gpuopt.device import Device
from gpuopt.optimizers.lars import lars
from gpuopt.rules.split import joined, split

pytestmark = [pytest.mark.value, pytest.mark.emulator]

SANITIZER = os.environ.get("GPUOPT_EMULATOR_SANITIZE")
FLOAT, DOUBLE, HALF, BRAIN = (
    np.dtype(each) for each in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
)
ONE_NORM = ClipLimits([np.float32(2)], ClipForm.TENSORFLOW, False)
SIZES = [1, 0, 77, CLIP_CHUNK + 9]
if not SANITIZER:
    SIZES += [CLIP_CHUNK, 3 * CLIP_CHUNK - 5]
# What each gradient is clipped to: exact in 16 bits.
BOUNDS = [np.inf if number % 3 else 0.5 for number in range(len(SIZES))]
# The types of a variable, its slot, its gradient, and what is beside it.
STORAGES: list[tuple[Any, ...]] = [
    *((each, each, each, None) for each in (FLOAT, DOUBLE, HALF, BRAIN)),
    (HALF, HALF, FLOAT, None),
    (FLOAT, BRAIN, FLOAT, None),
    (FLOAT, FLOAT, HALF, HALF),
    (FLOAT, FLOAT, FLOAT, BRAIN),
    (BRAIN, FLOAT, BRAIN, np.dtype(np.uint16)),
    (BRAIN, BRAIN, FLOAT, np.dtype(np.uint16)),
]
if SANITIZER == "thread":
    STORAGES = STORAGES[:1]


def launchers() -> Iterator[EmulatorLauncher]:
    """Of other orders of blocks and threads, and other numbers of multiprocessors."""
    for seed, multiprocessors in ((0, 4), (3, 1), (7, 9)):
        launcher = EmulatorLauncher(seed=seed)
        launcher.num_multiprocessors = multiprocessors
        yield launcher


def shifted(array: np.ndarray, shift: int) -> np.ndarray:
    """Returns a copy that does not begin at the address of a pack."""
    copy = np.zeros(array.size + 8, array.dtype)[shift : shift + array.size]
    copy[...] = array
    return copy


@pytest.mark.parametrize("storage", STORAGES, ids=lambda types: "-".join(map(str, types)))
def test_sums_and_norms_have_the_same_bits_in_every_order_at_any_address(storage: Any) -> None:
    var_type, slot_type, grad_type, beside_type = storage
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=size) for size in SIZES]
    gradients = [rng.normal(size=size).astype(grad_type) for size in SIZES]
    is_split = beside_type == np.uint16
    found = set()
    for shift, launcher in enumerate(launchers()):
        backend = CudaBackend(Device("gpu", 0), launcher)
        targets, beside, exact = [], [], []
        for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            at = shift if number % 2 else 2 * shift
            var, other = weight.astype(var_type), None
            if beside_type is not None:
                other = weight.astype(beside_type)
            if is_split:
                var, other = split(weight.astype(np.float32))
            wide = joined(var, other) if is_split else var
            clipped = np.clip(gradient.astype(np.float64), -BOUNDS[number], BOUNDS[number])
            terms = wide.astype(np.float64) ** 2, clipped**2
            exact.append([each.sum() for each in terms])
            slot = np.full(var.size, np.nan, slot_type)
            targets.append(Target(shifted(var, at), [slot]))
            beside += [] if other is None else [shifted(other, shift)]
        plan = plan_beside(backend, targets, beside)
        inputs = backend.clips.inputs(lars, plan, BOUNDS)
        assert inputs is not None
        given = [shifted(gradient, shift) for gradient in gradients]
        dense = DenseGradients(given, [0] * len(SIZES))
        before = launcher.launches
        factors = backend.clips.measure([dense._replace(inputs=inputs)], [], ONE_NORM).factors
        assert launcher.launches == before + 1
        # The norm is the one of gradients that are measured alone, and the host's.
        np.testing.assert_array_equal(factors, backend.clips.measure([dense], [], ONE_NORM).factors)
        host = CpuClips(CpuLimits()).measure([dense], [], ONE_NORM).factors
        np.testing.assert_array_equal(factors, host)
        sums = inputs.sums.reshape(-1, 2)
        expected = [each for each, size in zip(exact, SIZES, strict=True) if size]
        eps = np.finfo(compute_type(var_type)).eps
        np.testing.assert_allclose(sums, expected, rtol=16 * eps)
        found.add(sums.tobytes())
    assert len(found) == 1


def test_sums_that_floats_cannot_hold_are_of_a_gradient_made_smaller() -> None:
    rng = np.random.default_rng(2)
    size = CLIP_CHUNK + 77
    gradient = (rng.normal(size=size) * 2.0 ** np.repeat([100, 40], [CLIP_CHUNK, 77])).astype(FLOAT)
    weights = rng.normal(size=size).astype(FLOAT)
    backend = CudaBackend(Device("gpu", 0), EmulatorLauncher())
    plan = backend.plan_dense([Target(weights, [np.zeros(size, FLOAT)])])
    inputs = backend.clips.inputs(lars, plan, [np.inf])
    limits = ONE_NORM._replace(unscale=2.0**-90)
    dense = DenseGradients([gradient], [0], inputs=inputs)
    factors = backend.clips.measure([dense], [], limits).factors
    host = CpuClips(CpuLimits()).measure([dense._replace(inputs=None)], [], limits).factors
    np.testing.assert_array_equal(factors, host)
    assert inputs is not None
    exact = [np.sum(np.float64(each) ** 2) for each in (weights, gradient)]
    np.testing.assert_allclose(inputs.sums, exact, rtol=16 * np.finfo(FLOAT).eps)
