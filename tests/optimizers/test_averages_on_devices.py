"""Averages follow a step on each kind of device, in the launch that updates the variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dtypes import every_dtype
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from stages import STAGES

import gpuopt
from gpuopt import ExponentialMovingAverage, IndexedSlices, Variable
from gpuopt.backends import to_device
from gpuopt.device import Device

pytestmark = pytest.mark.value

# The loops around a rule depend on these.
ON_DEVICES = ["plain", "decay, clip_norm, groups", "cautious", "sums, clip_norm"]
ON_DEVICES += ["row-wise, clip_norm"]
SHAPES = [(3, 4), (), (0,), (70, 50), (5,), (131, 257)]


class Run:
    """A model that is trained on a device with averages."""

    def __init__(self, xp: Any, dtype: Any, is_sparse: bool) -> None:
        self._xp = xp
        self._rng = np.random.default_rng(5)
        shapes = [*SHAPES, *([(40, 12)] if is_sparse else [])]
        self.variables = [
            variable_on(xp, np.asarray(self._rng.normal(size=s)).astype(dtype), name=f"w{i}")
            for i, s in enumerate(shapes)
        ]
        self._is_sparse = is_sparse
        self.counter = Variable(np.int64(0), name="counter")
        self.averages = ExponentialMovingAverage(0.9, self.counter)

    def pairs(self) -> list[tuple[Any, Variable]]:
        given: list[tuple[Any, Variable]] = []
        for variable in self.variables:
            gradient = np.asarray(self._rng.normal(size=variable.shape)).astype(variable.dtype)
            given.append((self._xp.asarray(gradient), variable))
        if self._is_sparse:
            rows = self._rng.integers(0, 40, 300)
            values = self._rng.normal(size=(300, 12)).astype(self.variables[-1].dtype)
            slices = IndexedSlices(self._xp.asarray(values), self._xp.asarray(rows))
            given[-1] = (slices, self.variables[-1])
        return given


def check_steps(xp: Any, stages: str, dtype: Any, is_sparse: bool) -> None:
    """The averages are those that `apply` makes of the same variables, to the bit."""
    mine = Run(xp, dtype, is_sparse)
    apart = ExponentialMovingAverage(0.9, mine.counter, name="apart")
    optimizer = STAGES[stages](averages=mine.averages)
    for _ in range(3):
        optimizer.apply_gradients(mine.pairs(), mine.counter)
        apart.apply(mine.variables)
        for variable in mine.variables:
            got, expected = mine.averages.average(variable), apart.average(variable)
            assert got is not None
            assert expected is not None
            assert got.numpy().tobytes() == expected.numpy().tobytes(), variable.name


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "mixed"])
@pytest.mark.parametrize("stages", ON_DEVICES)
def test_averages_are_those_of_apply_on_every_device(stages: str, is_sparse: bool, xp: Any) -> None:
    check_steps(xp, stages, np.float32, is_sparse)


@every_dtype
def test_averages_of_every_type_are_those_of_apply(dtype: Any, xp: Any) -> None:
    check_steps(xp, "decay", dtype, is_sparse=False)


@pytest.mark.emulator
def test_an_average_takes_no_launch_of_its_own(emulated_gpus: list[EmulatorLauncher]) -> None:
    variables = [Variable(np.ones(s, np.float32), device="gpu:0") for s in [(3,), (40, 50)] * 4]
    gradients = [v.storage.copy() for v in variables]
    for stages, launches in (("plain", 1), ("decay", 1), ("clip_norm", 2), ("sums", 2)):
        optimizer = STAGES[stages](averages=ExponentialMovingAverage(0.9))
        for step in range(4):
            before = emulated_gpus[0].launches
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
            assert step == 0 or emulated_gpus[0].launches - before == launches


# The type of variables, and what the optimizer is given.
STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "float16": ("float16", {}),
    "bfloat16": ("bfloat16", {}),
    "slots in bfloat16": ("float32", {"slot_dtype": "bfloat16"}),
    "float16, slots in bfloat16": ("float16", {"slot_dtype": "bfloat16"}),
    "masters, slots in bfloat16": ("float16", {"masters": "float32", "slot_dtype": "bfloat16"}),
    "remainders": ("bfloat16", {"masters": "remainder"}),
    "remainders, slots in bfloat16": (
        "bfloat16",
        {"masters": "remainder", "slot_dtype": "bfloat16"},
    ),
    "at random": ("bfloat16", {"stochastic_rounding": 7}),
    "slots at random": ("float32", {"slot_dtype": "bfloat16", "stochastic_rounding": 7}),
    "remainders, slots at random": (
        "bfloat16",
        {"masters": "remainder", "slot_dtype": "bfloat16", "stochastic_rounding": 7},
    ),
    "8 bits": ("float32", {"slot_bits": 8}),
    "8 bits, bfloat16": ("bfloat16", {"slot_bits": 8}),
}


@pytest.mark.emulator
@pytest.mark.parametrize("stored", STORED)
def test_averages_follow_what_is_stored_in_the_launch_that_stores_it(
    emulated_gpus: list[EmulatorLauncher], stored: str
) -> None:
    """To the bit, as one that `apply` moves after each step; the step is as without it."""
    name, options = STORED[stored]
    rng = np.random.default_rng(3)
    # The last one is not where packs are.
    given = [np.asarray(rng.normal(size=shape)) for shape in [(3, 4), (), (70, 9), (0,), (300,)]]
    variables, same = [
        [Variable(each.astype(name), device="gpu:0") for each in given] for _ in range(2)
    ]
    averages, apart = ExponentialMovingAverage(0.75), ExponentialMovingAverage(0.75, name="apart")
    optimizer = gpuopt.AdamOptimizer(0.1, averages=averages, **options)
    without = gpuopt.AdamOptimizer(0.1, **options)
    for step in range(4):
        pairs = [
            (to_device(np.asarray(rng.normal(size=v.shape)).astype(name), v.device), v)
            for v in variables
        ]
        before = emulated_gpus[0].launches
        optimizer.apply_gradients(pairs)
        assert step == 0 or emulated_gpus[0].launches - before == 1
        without.apply_gradients([(g, each) for (g, _), each in zip(pairs, same, strict=True)])
        for variable, each in zip(variables, same, strict=True):
            assert variable.numpy().tobytes() == each.numpy().tobytes()
        masters = [optimizer.get_slot(variable, "master") for variable in variables]
        followed = [
            variable if master is None else master
            for variable, master in zip(variables, masters, strict=True)
        ]
        before = emulated_gpus[0].launches
        apart.apply(followed)
        assert emulated_gpus[0].launches - before == 1
        for variable, value in zip(variables, followed, strict=True):
            mine, expected = averages.average(variable), apart.average(value)
            assert mine is not None
            assert expected is not None
            assert mine.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.emulator
def test_a_refused_step_leaves_averages_and_makes_none(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    table = Variable(np.ones((50, 4), np.float32), device="gpu:0", name="table")
    old, new = (Variable(np.ones(4, np.float32), device="gpu:0") for _ in range(2))
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    gpu = Device.parse("gpu:0")
    one = to_device(np.ones(4, np.float32), gpu)
    optimizer.apply_gradients([(one, old)])
    rows = IndexedSlices(
        to_device(np.ones((2, 4), np.float32), gpu), to_device(np.array([3, 50]), gpu)
    )
    optimizer.apply_gradients([(rows, table), (one, old), (one, new)])
    with pytest.raises(IndexError, match="row 50 is not in"):
        optimizer.check()
    assert averages.average(table) is None
    assert averages.average(new) is None
    average = averages.average(old)
    assert average is not None
    assert average.numpy().tolist() == [0] * 4
    optimizer.apply_gradients([(one, old), (one, new)])
    assert average.numpy().tolist() == [-0.5] * 4
    made = averages.average(new)
    assert made is not None
    assert made.numpy().tolist() == [0] * 4


@pytest.mark.emulator
def test_each_gpu_and_the_host_move_their_own_averages(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [
        Variable(np.zeros(3, np.float32), device=place) for place in ("gpu:0", "gpu:1", "cpu")
    ]
    averages = ExponentialMovingAverage(0.5)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, averages=averages)
    for _ in range(2):
        optimizer.apply_gradients(
            [(to_device(np.float32([1, 2, 3]), v.device), v) for v in variables]
        )
    for variable in variables:
        average = averages.average(variable)
        assert average is not None
        assert average.device == variable.device
        assert average.numpy().tolist() == [-1.5, -3, -4.5]
