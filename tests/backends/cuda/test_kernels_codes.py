"""Slots in 8 bits on GPUs: as the host's, in one launch, and with 2.03 bytes for each parameter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME
from emulator import EmulatorLauncher

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable, backends
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.optimizers.base import RuleOptimizer

pytestmark = pytest.mark.value

Make = Callable[..., Any]

on_gpus = pytest.mark.parametrize(
    "gpus",
    [
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("emulated", marks=pytest.mark.emulator),
    ],
    indirect=True,
)
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda **more: gpuopt.MomentumOptimizer(0.25, 0.5, slot_bits=8, **more),
    "adam": lambda **more: gpuopt.AdamOptimizer(0.01, slot_bits=8, **more),
    "lazy-adam": lambda **more: gpuopt.LazyAdamOptimizer(0.01, slot_bits=8, **more),
    "adam-w": lambda **more: gpuopt.AdamWOptimizer(0.01, 0.01, slot_bits=8, **more),
    "torch-adam-w": lambda **more: gpuopt.TorchAdamWOptimizer(0.01, slot_bits=8, **more),
    "lion": lambda **more: gpuopt.LionOptimizer(0.01, weight_decay=0.1, slot_bits=8, **more),
}
# What else a step may do, by the arguments for it.
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.5},
    "groups": {"groups": [ParameterGroup("table", learning_rate=0.5)]},
    "clipped groups": {"clip_norm": 2.0, "groups": [ParameterGroup("table", clip_value=0.02)]},
}
CASES = [
    *((name, "plain", "mixed", "float32") for name in OPTIMIZERS),
    *(("adam", stage, "mixed", "float32") for stage in STAGES),
    ("adam", "plain", "sparse", "float32"),
    ("adam", "plain", "mixed", "bfloat16"),
    ("lion", "clipped groups", "mixed", "float32"),
    ("torch-adam-w", "cautious", "mixed", "float32"),
    ("adam", "bitsandbytes", "dense", "float32"),
]
# Which threads meet depends on how many codes an element has, and on what a step measures.
if os.environ.get("GPUOPT_EMULATOR_SANITIZE") == "thread":
    CASES = [("adam", "plain", "mixed", "float32"), ("lion", "clipped groups", "mixed", "float32")]
MORE = {
    **STAGES,
    "cautious": {"cautious": True},
    "bitsandbytes": {"slot_form": "bitsandbytes"},
}
# Blocks that are whole, that end early, of rows of several, and of several rows in a warp; and two
# tables of one width, which are updated together.
SHAPES: list[tuple[int, ...]] = [
    (5000,),
    (3, 300),
    (40, 16),
    (9, 300),
    (9, 5),
    (7,),
    (4, 512),
    (0,),
    (6, 1),
]


@pytest.fixture
def emulated_gpu() -> Iterator[EmulatorLauncher]:
    """Makes gpu:0 usable, by kernels that are compiled as tests need them."""
    launcher = EmulatorLauncher(xp=fake_cupy, index=0, seed=1)
    gpu = gpuopt.Device("gpu", 0)
    with backends.using(gpu, CudaBackend(gpu, launcher)):
        yield launcher


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> None:
    if request.param == "emulated":
        request.getfixturevalue("emulated_gpu")


def normal(seed: int, shape: tuple[int, ...]) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def gradient_of(seed: int, shape: tuple[int, ...], gradients: str, dtype: Any) -> Any:
    value = (normal(seed, shape) * np.float32(0.1)).astype(dtype)
    if (
        len(shape) == 1
        or gradients == "dense"
        or (gradients == "mixed" and (seed // 100 + seed) % 2)
    ):
        return value
    rows = np.random.default_rng(seed).integers(0, shape[0], 2 * shape[0])
    return IndexedSlices(value[rows], rows, shape)


@on_gpus
@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids="-".join)
def test_a_gpu_writes_the_hosts_codes(gpus: None, case: tuple[str, str, str, str]) -> None:
    name, stage, gradients, type_name = case
    dtype = DTYPES_BY_NAME[type_name]
    shapes = [each for each in SHAPES if gradients != "sparse" or len(each) == 2]
    optimizers, every = [], []
    for device in ("cpu", "gpu:0"):
        optimizers.append(OPTIMIZERS[name](**MORE[stage]))
        every.append(
            [
                Variable(
                    normal(number, shape).astype(dtype),
                    device=device,
                    name=f"{'table' if len(shape) == 2 else 'weights'}_{number}",
                )
                for number, shape in enumerate(shapes)
            ]
        )
    wrong = total = 0
    for step in range(4):
        given = [gradient_of(100 * step + i, s, gradients, dtype) for i, s in enumerate(shapes)]
        for optimizer, variables in zip(optimizers, every, strict=True):
            optimizer.apply_gradients(list(zip(given, variables, strict=True)))
        for host, gpu in zip(*every, strict=True):
            if not host.size:
                continue
            expected, got = (each.numpy().astype(np.float32) for each in (host, gpu))
            tolerance = 4 * float(np.finfo(np.float32).eps) * max(1, np.abs(expected).max())
            if dtype != np.float32:  # two roundings to 8 bits
                tolerance = np.abs(expected).max() / 128
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)
            gpu.assign(host.numpy())
            for slot_name in optimizers[0].get_slot_names():
                here, there = (
                    optimizer.get_slot(variable, slot_name)
                    for optimizer, variable in zip(optimizers, (host, gpu), strict=True)
                )
                if here.shape == ():  # the count of a variable's steps, which has no codes
                    assert there.numpy() == here.numpy()
                    continue
                # Of one number, the scale is what is left where it and the gradient cancel.
                scales = there.scales.numpy(), here.scales.numpy()
                np.testing.assert_allclose(*scales, rtol=1e-6, atol=1e-8)
                codes = here.codes.numpy().astype(int)
                apart = np.abs(there.codes.numpy() - codes)
                # A GPU adds to products before it rounds: a number in the middle may go elsewhere.
                assert apart.max() <= 1
                wrong, total = wrong + int((apart > 0).sum()), total + codes.size
                there.codes.assign(here.codes.numpy())
                there.scales.assign(here.scales.numpy())
    assert wrong <= total / 1000


@on_gpus
@pytest.mark.parametrize("name", ["momentum", "lion"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_that_need_no_rounding_have_the_same_bits(
    gpus: None, name: str, shape: tuple[int, ...]
) -> None:
    """Products by powers of two: adding to them before they are rounded changes nothing."""
    found = []
    for device in ("cpu", "gpu:0"):
        optimizer = gpuopt.MomentumOptimizer(0.25, 0.5, slot_bits=8)
        if name == "lion":
            optimizer = gpuopt.LionOptimizer(0.25, 0.5, 0.5, slot_bits=8)
        variable = Variable(normal(1, shape), device=device)
        for step in range(5):
            gradient: Any = normal(step, shape)
            if step > 2 and len(shape) == 2:
                rows = np.random.default_rng(step).permutation(shape[0])
                gradient = IndexedSlices(gradient[1:], rows[1:], shape)
            optimizer.apply_gradients([(gradient, variable)])
        [slot_name] = optimizer.get_slot_names()
        slot = optimizer.get_slot(variable, slot_name)
        found.append([variable.numpy(), slot.codes.numpy(), slot.scales.numpy()])
    for host, gpu in zip(*found, strict=True):
        np.testing.assert_array_equal(gpu, host)


@on_gpus
def test_elements_off_the_addresses_of_packs_are_updated_one_by_one(gpus: None) -> None:
    xp = backends.backend_for(gpuopt.Device("gpu", 0)).xp
    for offset in (1, 2):
        host, start = normal(0, (1000,)), normal(0, (1000 + offset,))
        start[offset:] = host
        gradient = normal(1, (1000,))
        optimizers = [OPTIMIZERS["momentum"]() for _ in range(2)]
        whole = xp.asarray(start)
        shifted = xp.asarray(np.concatenate([gradient[:1], gradient]))[1:]
        for _ in range(2):
            optimizers[0].apply_gradients([(gradient, host)])
            optimizers[1].apply_gradients([(shifted, whole[offset:])])
        np.testing.assert_array_equal(xp.asnumpy(whole[offset:]), host)


@on_gpus
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_slots_that_would_not_be_finite_begin_anew(gpus: None, bad: float) -> None:
    optimizer = OPTIMIZERS["adam"]()
    variable = Variable(np.zeros((4, 80), np.float32), device="gpu:0")
    gradient = normal(0, (4, 80))
    optimizer.apply_gradients([(gradient, variable)])
    gradient[1, 3] = bad
    optimizer.apply_gradients([(gradient, variable)])
    for name in "mv":
        slot = optimizer.get_slot(variable, name).numpy()
        assert slot[1, 3] == 0
        assert np.isfinite(slot).all()
        assert slot[1, 4] != 0
    assert np.isnan(variable.numpy()[1, 3])
    assert np.isfinite(np.delete(variable.numpy(), 83)).all()


@gpuopt.update_rule(squares=("v",))
def unusual(var: Any, grad: Any, m: Any, v: Any, *, rate: Any) -> None:
    m += np.where(grad == 0, 100, 1)  # of an element that is not there, the largest
    v += grad
    var -= rate * m


class Unusual(RuleOptimizer):
    rule = unusual

    def __init__(self, **common: Any) -> None:
        super().__init__(common, rate=0.5)


@on_gpus
@pytest.mark.parametrize("form", ["root", "bitsandbytes"])
@pytest.mark.parametrize("shape", [(600,), (9, 300), (9, 5)], ids=str)
def test_squares_below_0_and_elements_that_are_not_there_leave_the_hosts_codes(
    gpus: None, form: str, shape: tuple[int, ...]
) -> None:
    found = []
    for device in ("cpu", "gpu:0"):
        optimizer = Unusual(slot_bits=8, slot_form=form)
        variable = Variable(np.zeros(shape, np.float32), device=device)
        for step in range(3):
            gradient = normal(step, shape) * np.float32(10.0**-step)
            flat = gradient.reshape(-1)
            flat[:8] = [-np.inf, np.inf, np.nan, -0.0, 0.0, -1e-30, 3e38, -3e38]
            optimizer.apply_gradients([(gradient, variable)])
        slots = [optimizer.get_slot(variable, name) for name in "mv"]
        found.append([each.numpy() for slot in slots for each in (slot.codes, slot.scales)])
    for host, gpu in zip(*found, strict=True):
        np.testing.assert_array_equal(gpu, host)


@on_gpus
def test_a_refused_row_changes_nothing(gpus: None) -> None:
    optimizer = OPTIMIZERS["adam"]()
    variables = [Variable(normal(i, (6, 40)), device="gpu:0") for i in range(2)]
    given = [gradient_of(2, (6, 40), "sparse", np.float32), normal(3, (6, 40))]
    optimizer.apply_gradients(list(zip(given, variables, strict=True)))
    before = [each.numpy() for each in variables]
    codes = [optimizer.get_slot(each, "m").codes.numpy() for each in variables]
    # On the GPU, where the host does not see them.
    xp = backends.backend_for(gpuopt.Device("gpu", 0)).xp
    bad = IndexedSlices(xp.asarray(normal(4, (2, 40))), xp.asarray(np.array([1, 6])), (6, 40))
    with pytest.raises(IndexError):  # noqa: PT012  (the error may come later)
        optimizer.apply_gradients([(bad, variables[0]), (given[1], variables[1])])
        optimizer.check()
    for variable, value, of_slot in zip(variables, before, codes, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
        np.testing.assert_array_equal(optimizer.get_slot(variable, "m").codes.numpy(), of_slot)


@pytest.mark.emulator
@pytest.mark.parametrize(("more", "launches"), [({}, 1), ({"clip_norm": 1.0}, 2)])
def test_a_step_of_many_variables_is_one_launch_or_two_with_clipping(
    emulated_gpu: EmulatorLauncher, more: dict[str, Any], launches: int
) -> None:
    optimizer = OPTIMIZERS["adam"](**more)
    variables = [Variable(normal(i, (300 + i,)), device="gpu:0") for i in range(4)]
    given = [emulated_gpu.xp.asarray(each.numpy()) for each in variables]
    pairs = list(zip(given, variables, strict=True))
    counted = []
    for _ in range(4):
        before = emulated_gpu.launches, emulated_gpu.uploads
        optimizer.apply_gradients(pairs)
        after = emulated_gpu.launches, emulated_gpu.uploads
        counted.append([b - a for a, b in zip(before, after, strict=True)])
    assert counted[2:] == [[launches, 0]] * 2


@pytest.mark.emulator
def test_dense_adam_has_2_03_bytes_of_state_for_each_parameter(
    emulated_gpu: EmulatorLauncher,
) -> None:
    variable = Variable(np.zeros(1 << 16, np.float32), device="gpu:0")
    optimizer = OPTIMIZERS["adam"]()
    optimizer.apply_gradients([(np.ones(1 << 16, np.float32), variable)])
    slots = [slot.unread_storage for slot in optimizer.state.slots_of(variable)]
    assert sum(slot.nbytes for slot in slots) == 2 * (1 + 4 / 256) * 2**16
