"""What a rule sums over variables and gradients is added up as these are measured, on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from each_device import variable_on
from emulator.emulator import EmulatorLauncher

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
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

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
FLOAT, DOUBLE, HALF, BRAIN = (
    np.dtype(each) for each in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
)
SCALE = 64.0
NUMBERS: dict[str, Any] = {
    "learning_rate": 2.0,
    "momentum": 0.5,
    "weight_decay": 0.25,
    "eeta": 0.125,
}
ONE_NORM = ClipLimits([np.float32(2)], ClipForm.TENSORFLOW, False)
SIZES = [1, 0, 77, CLIP_CHUNK + 9]
if not SANITIZED:
    SIZES += [CLIP_CHUNK, 3 * CLIP_CHUNK - 5]
# The types of a variable, its slot, its gradient, and what is beside it.
STORAGES = [
    *((each, each, each, None) for each in (FLOAT, DOUBLE, HALF, BRAIN)),
    (HALF, HALF, FLOAT, None),
    (FLOAT, BRAIN, FLOAT, None),
    (FLOAT, FLOAT, HALF, HALF),
    (FLOAT, FLOAT, FLOAT, BRAIN),
    (BRAIN, FLOAT, BRAIN, np.dtype(np.uint16)),
    (BRAIN, BRAIN, FLOAT, np.dtype(np.uint16)),
]


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


@pytest.mark.emulator
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
            terms = wide.astype(np.float64) ** 2, gradient.astype(np.float64) ** 2
            exact.append([each.sum() for each in terms])
            slot = np.full(var.size, np.nan, slot_type)
            targets.append(Target(shifted(var, at), [slot]))
            beside += [] if other is None else [shifted(other, shift)]
        plan = backend.plan_dense(targets, beside=beside)
        inputs = backend.clips.inputs(lars, plan)
        assert inputs is not None
        given = [shifted(gradient, shift) for gradient in gradients]
        dense = DenseGradients(given, [0] * len(SIZES))
        before = launcher.launches
        factors = backend.clips.measure([dense._replace(inputs=inputs)], [], ONE_NORM)
        assert launcher.launches == before + 1
        # The norm is the one of gradients that are measured alone, and the host's.
        np.testing.assert_array_equal(factors, backend.clips.measure([dense], [], ONE_NORM))
        host = CpuClips(CpuLimits()).measure([dense], [], ONE_NORM)
        np.testing.assert_array_equal(factors, host)
        sums = inputs.sums.reshape(-1, 2)
        expected = [each for each, size in zip(exact, SIZES, strict=True) if size]
        eps = np.finfo(compute_type(var_type)).eps
        np.testing.assert_allclose(sums, expected, rtol=16 * eps)
        found.add(sums.tobytes())
    assert len(found) == 1


@pytest.mark.emulator
def test_sums_that_floats_cannot_hold_are_of_a_gradient_made_smaller() -> None:
    rng = np.random.default_rng(2)
    size = CLIP_CHUNK + 77
    gradient = (rng.normal(size=size) * 2.0 ** np.repeat([100, 40], [CLIP_CHUNK, 77])).astype(FLOAT)
    weights = rng.normal(size=size).astype(FLOAT)
    backend = CudaBackend(Device("gpu", 0), EmulatorLauncher())
    plan = backend.plan_dense([Target(weights, [np.zeros(size, FLOAT)])])
    inputs = backend.clips.inputs(lars, plan)
    limits = ONE_NORM._replace(unscale=2.0**-90)
    dense = DenseGradients([gradient], [0], inputs=inputs)
    factors = backend.clips.measure([dense], [], limits)
    host = CpuClips(CpuLimits()).measure([dense._replace(inputs=None)], [], limits)
    np.testing.assert_array_equal(factors, host)
    assert inputs is not None
    exact = [np.sum(np.float64(each) ** 2) for each in (weights, gradient)]
    np.testing.assert_allclose(inputs.sums, exact, rtol=16 * np.finfo(FLOAT).eps)


class Run:
    """A few steps of LARS."""

    def __init__(self, xp: Any, dtype: Any, is_scaled: bool = False, **options: Any) -> None:
        self.xp = xp
        rng = np.random.default_rng(3)
        self.dtype = np.dtype(dtype)
        shapes = {"w0": (3, 4), "w1": (), "w2": (0,), "w3": (131, 257), "w4": (7,), "bias": (5,)}
        self.variables = [
            variable_on(xp, np.asarray(rng.normal(size=shape)).astype(dtype), name=name)
            for name, shape in shapes.items()
        ]
        self.inner = gpuopt.LARSOptimizer(**NUMBERS, **options)
        self.optimizer: Any = self.inner
        if is_scaled:
            self.optimizer = gpuopt.LossScaleOptimizer(
                self.inner, gpuopt.FixedLossScaleManager(SCALE)
            )
        self._is_scaled = is_scaled
        self._rng = rng

    def step(self, is_bad: bool = False) -> None:
        pairs = []
        scale = np.float32(SCALE if self._is_scaled else 1)
        for variable in self.variables:
            values = self._rng.normal(size=variable.shape) * scale
            gradient = np.asarray(values).astype(self.dtype)
            if is_bad and variable is self.variables[4]:
                gradient[3] = np.inf
            pairs.append((self.xp.asarray(gradient), variable))
        more = {"loss_scale": scale} if self._is_scaled else {}
        self.optimizer.apply_gradients(pairs, **more)

    def states(self) -> list[np.ndarray]:
        slots = [
            self.inner.get_slot(variable, name)
            for variable in self.variables
            for name in self.inner.get_slot_names()
        ]
        arrays = [*self.variables, *(slot for slot in slots if slot is not None)]
        return [each.numpy().astype(np.float64) for each in arrays]


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm": (FLOAT, {"clip_norm": 2.0}),
    "norm of float64": (DOUBLE, {"clip_norm": 2.0}),
    "norm of float16": (HALF, {"clip_norm": 2.0}),
    "norm of bfloat16": (BRAIN, {"clip_norm": 2.0}),
    "torch's form": (FLOAT, {"clip_norm": 2.0, "clip_form": "torch"}),
    "scaled": (FLOAT, {"is_scaled": True}),
    "scaled, norm of float16": (HALF, {"is_scaled": True, "clip_norm": 2.0}),
    "masters": (HALF, {"is_scaled": True, "clip_norm": 2.0, "masters": "float32"}),
    "remainders": (BRAIN, {"clip_norm": 2.0, "masters": "remainder"}),
    "slots of bfloat16": (FLOAT, {"clip_norm": 2.0, "slot_dtype": "bfloat16"}),
    "rounded": (BRAIN, {"clip_norm": 2.0, "stochastic_rounding": 7}),
    "names without a norm": (FLOAT, {"clip_norm": 2.0, "skip_list": ["bias"]}),
    "finite": (FLOAT, {"on_nonfinite": "skip", "clip_norm": 2.0}),
    "groups": (
        FLOAT,
        {"clip_norm": 2.0, "groups": [ParameterGroup("w[13](_.*)?", learning_rate=0.5, eeta=0.25)]},
    ),
    "scaled, groups": (
        FLOAT,
        {
            "is_scaled": True,
            "groups": [ParameterGroup("w[13](_.*)?", learning_rate=0.5, eeta=0.25)],
        },
    ),
    "norms of groups": (
        FLOAT,
        {"clip_norm": 2.0, "groups": [ParameterGroup("w[13](_.*)?", clip_norm=0.5)]},
    ),
    "a group without a norm": (
        FLOAT,
        {"clip_norm": 2.0, "groups": [ParameterGroup("w[13](_.*)?", clip_norm=None)]},
    ),
    "a group clipped by value": (
        FLOAT,
        {"clip_norm": 2.0, "groups": [ParameterGroup("w4(_.*)?", clip_norm=None, clip_value=0.5)]},
    ),
    "scaled, clipped by value": (FLOAT, {"is_scaled": True, "clip_value": 0.5}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_device_makes_the_same_steps(name: str, xp: Any) -> None:
    dtype, options = OPTIONS[name]
    mine, theirs = Run(xp, dtype, **options), Run(np, dtype, **options)
    may_skip = "is_scaled" in options or "on_nonfinite" in options
    for number in range(4):
        for run in (mine, theirs):
            run.step(is_bad=may_skip and number == 1)
    tolerance = 24 * float(ml_dtypes.finfo(dtype).eps)
    for got, expected in zip(mine.states(), theirs.states(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    if "is_scaled" in options:
        assert mine.optimizer.num_skipped == theirs.optimizer.num_skipped == 1


# What a step takes, for each of these; where sums are of gradients as they are clipped by value, or
# some have no norm, the update has them added up by a launch before it.
LAUNCHES = {
    **dict.fromkeys(OPTIONS, 2),
    "names without a norm": 4,  # two rules
    "norms of groups": 3,  # two norms
    "a group without a norm": 3,
    "a group clipped by value": 3,
    "scaled, clipped by value": 3,
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_is_two_launches_that_the_host_does_not_wait_for(
    name: str, emulated_gpus: list[EmulatorLauncher]
) -> None:
    dtype, options = OPTIONS[name]
    run = Run(fake_cupy, dtype, **options)
    for _ in range(2):
        run.step()
    for _ in range(2):
        before, waits = emulated_gpus[0].launches, fake_cupy.counts.synchronisations
        run.step()
        assert emulated_gpus[0].launches - before == LAUNCHES[name]
        if "on_nonfinite" not in options:
            assert fake_cupy.counts.synchronisations == waits


@pytest.mark.emulator
def test_variables_that_are_not_contiguous_and_gradients_of_rows_are_summed_too(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    rng = np.random.default_rng(4)
    start, gradient = (rng.normal(size=(40, 12)).astype(FLOAT) for _ in range(2))
    states = []
    for xp in (np, fake_cupy):
        memory = xp.asarray(np.repeat(start, 2, axis=1))
        table = variable_on(xp, start)
        optimizer = gpuopt.LARSOptimizer(**NUMBERS, clip_norm=2.0)
        rows = IndexedSlices(xp.asarray(gradient[:3]), xp.asarray(np.array([7, 1, 7])))
        for _ in range(2):
            optimizer.apply_gradients([(xp.asarray(gradient), memory[:, ::2]), (rows, table)])
        states.append([gpuopt.backends.to_device(memory, Device.cpu), table.numpy()])
    for got, expected in zip(*states, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.emulator
def test_variables_of_several_gpus_have_sums_of_their_own(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    rng = np.random.default_rng(5)
    starts, gradients = ([rng.normal(size=n).astype(FLOAT) for n in (9, 700)] for _ in range(2))
    states = []
    for devices in (["cpu", "cpu"], ["gpu:0", "gpu:1"]):
        for is_scaled in (False, True):
            variables = [Variable(w, device=on) for w, on in zip(starts, devices, strict=True)]
            optimizer: Any = gpuopt.LARSOptimizer(**NUMBERS, clip_norm=2.0)
            if is_scaled:
                optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 3))
            for _ in range(2):
                before = [launcher.launches for launcher in emulated_gpus[:2]]
                scale = np.float32(8 if is_scaled else 1)
                pairs = zip(gradients, variables, strict=True)
                given = [(gpuopt.backends.to_device(g * scale, v.device), v) for g, v in pairs]
                optimizer.apply_gradients(given)
            if devices[0] != "cpu":
                after = [launcher.launches for launcher in emulated_gpus[:2]]
                assert [a - b for a, b in zip(after, before, strict=True)] == [3, 2]
            states.append([variable.numpy() for variable in variables])
    for got in states[1:]:
        for mine, expected in zip(got, states[0], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=2e-6, atol=2e-6)
