"""What a rule sums over variables and gradients is added up as these are measured, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from array_slots import array_slots
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from gpu_streams import new_stream, uploaded

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.device import Device

pytestmark = pytest.mark.value

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
            for name in array_slots(self.inner)
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
    "finite, without a norm": (FLOAT, {"on_nonfinite": "skip"}),
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
@pytest.mark.one_in(3)
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


@pytest.mark.internal
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
        assert emulated_gpus[0].launches - before == 2
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
def test_a_sum_that_overflows_leaves_the_others_as_they_are(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    start = np.full(40, 3e19, FLOAT)  # with infinite squares
    states = []
    for xp in (np, fake_cupy):
        w = variable_on(xp, start)
        optimizer = gpuopt.LARSOptimizer(**NUMBERS, clip_norm=2.0)
        optimizer.apply_gradients([(xp.asarray(np.ones(40, FLOAT)), w)])
        states.append(w.numpy())
    np.testing.assert_array_equal(*states)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("options", "launches"),
    # One joins what all have measured; by value, only it knows what gradients are divided by.
    [({"clip_norm": 2.0}, ([3, 2], [3, 2])), ({"clip_value": 0.5}, ([2, 2], [4, 3]))],
    ids=["norm", "value"],
)
def test_variables_of_several_gpus_have_sums_of_their_own(
    options: dict[str, float],
    launches: tuple[list[int], ...],
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    rng = np.random.default_rng(5)
    starts, gradients = ([rng.normal(size=n).astype(FLOAT) for n in (9, 700)] for _ in range(2))
    states = []
    for devices in (["cpu", "cpu"], ["gpu:0", "gpu:1"]):
        for is_scaled in (False, True):
            variables = [Variable(w, device=on) for w, on in zip(starts, devices, strict=True)]
            optimizer: Any = gpuopt.LARSOptimizer(**NUMBERS, **options)
            if is_scaled:
                optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 3))
            for _ in range(2):
                before = [launcher.launches for launcher in emulated_gpus[:2]]
                scale = np.float32(8 if is_scaled else 1)
                pairs = zip(gradients, variables, strict=True)
                given = [(gpuopt.backends.to_device(g * scale, v.device), v) for g, v in pairs]
                # As `minimize` does: the host need not know the scale.
                more = {"loss_scale": optimizer._scale_of_loss(None)} if is_scaled else {}
                optimizer.apply_gradients(given, **more)
            if devices[0] != "cpu":
                after = [launcher.launches for launcher in emulated_gpus[:2]]
                assert [a - b for a, b in zip(after, before, strict=True)] == launches[is_scaled]
            states.append([variable.numpy() for variable in variables])
    for got in states[1:]:
        for mine, expected in zip(got, states[0], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
def test_weights_that_another_stream_writes_are_summed_when_they_are_there(
    every_schedule: str,
) -> None:
    xp: Any = pytest.importorskip("cupy")
    rng = np.random.default_rng(6)
    start, gradient = (rng.normal(size=300).astype(FLOAT) for _ in range(2))
    states = []
    for device in ("cpu", "gpu:0"):
        is_gpu = device != "cpu"
        w = Variable(np.zeros(300, FLOAT), device=device)
        optimizer = gpuopt.LARSOptimizer(**NUMBERS, clip_norm=2.0)
        given = uploaded(gradient) if is_gpu else gradient
        optimizer.apply_gradients([(given, w)])
        if is_gpu:
            xp.cuda.Device(0).synchronize()
        first, second = (new_stream() if is_gpu else nullcontext() for _ in range(2))
        with first:
            w.assign(start)
        with second:
            optimizer.apply_gradients([(given, w)])
        states.append(w.numpy())
    np.testing.assert_allclose(*states, rtol=2e-6, atol=2e-6)


def write(w: Variable, other: gpuopt.Optimizer) -> None:
    """Its master copy follows only when somebody needs it."""
    w.assign(w.numpy() * w.dtype.type(4))


def update_rows(w: Variable, other: gpuopt.Optimizer) -> None:
    """Leaves rows that have missed steps."""
    for row in (0, 1, 1, 1):
        slices = IndexedSlices(np.ones((1, 4), w.dtype), np.array([row]))
        other.apply_gradients([(slices, w)])


@pytest.mark.emulator
@pytest.mark.parametrize("change", [write, update_rows], ids=lambda each: each.__name__)
def test_weights_are_summed_as_others_left_them_where_the_host_decides(
    change: Callable[[Variable, gpuopt.Optimizer], None], emulated_gpus: list[EmulatorLauncher]
) -> None:
    has_master = change is write
    dtype = HALF if has_master else FLOAT
    states = []
    for xp in (np, fake_cupy):
        w, gradient = variable_on(xp, np.full((6, 4), 3, dtype)), xp.asarray(np.ones((6, 4), dtype))
        other = gpuopt.AdamOptimizer(0.5, catch_up=True)
        numbers = {**NUMBERS, "learning_rate": lambda: 2.0}
        masters = "float32" if has_master else None
        optimizer = gpuopt.LARSOptimizer(
            **numbers, masters=masters, on_nonfinite="skip", clip_norm=2.0
        )
        optimizer.apply_gradients([(gradient, w)])
        change(w, other)
        optimizer.apply_gradients([(gradient, w)])
        states.append(w.numpy().astype(np.float64))
    np.testing.assert_allclose(*states, rtol=2e-3)
