"""The CUDA form of each schedule has the values of its numpy form. Needs g++, not a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher
from every_schedule_function import DECAYS, NOISY, PIECES

import gpuopt
from gpuopt.backends.cuda import kernels
from gpuopt.rules.schedule_formulas import FORMULAS
from gpuopt.schedules import Schedule

pytestmark = pytest.mark.emulator

# The last reach beyond all digits of float32, and of 32 bits.
FIRST_STEPS = [0, 2**24 - 100, 2**40 - 3]
COUNT = 500


def schedules(learning_rate: Any) -> list[Schedule]:
    step = np.array(0)  # no Variable: they are made when tests are collected, and live as long
    made = []
    for name, kwargs in DECAYS:
        first = "max_learning_rate" if name == "one_cycle" else "learning_rate"
        given = {first: learning_rate, "global_step": step, **kwargs}
        made.append(getattr(gpuopt, name)(**given))
    values = [type(learning_rate)(value) for value in PIECES["values"]]
    made.append(gpuopt.piecewise_constant(step, PIECES["boundaries"], values))
    made.append(gpuopt.noisy_linear_cosine_decay(learning_rate, step, **NOISY))
    made += [gpuopt.linear_warmup(each, step, 13, 0.01) for each in made]
    made.append(gpuopt.linear_warmup(made[-1], step, 7, 0.3))
    return made


def on_device(schedule: Schedule, first: int, num_blocks: int = 3) -> np.ndarray:
    values = np.full(COUNT, np.nan, schedule.dtype)
    EmulatorLauncher(seed=1).launch(
        kernels.evaluate_schedule(schedule.dtype.name),
        num_blocks,
        64,
        form=schedule.device_form(),
        step=np.array([first], np.int64),
        count=COUNT,
        values=values,
    )
    return values


@pytest.mark.parametrize("first", FIRST_STEPS)
@pytest.mark.parametrize("schedule", schedules(0.4), ids=lambda each: each.name)
def test_device_has_the_hosts_bits_in_float32(schedule: Schedule, first: int) -> None:
    expected = schedule.at(np.arange(first, first + COUNT))
    # CuPy has kernels flush what is too small for float32's full precision to 0.
    expected[np.abs(expected) < np.finfo(np.float32).tiny] = 0
    assert on_device(schedule, first).tolist() == expected.tolist()


@pytest.mark.parametrize("schedule", schedules(np.float64(0.4)), ids=lambda each: each.name)
def test_device_has_the_hosts_values_in_float64(schedule: Schedule) -> None:
    assert schedule.dtype == np.float64
    # Two libraries' powers and cosines; the cosines are of size 1, at angles of some turns.
    np.testing.assert_allclose(
        on_device(schedule, 0), schedule.at(range(COUNT)), rtol=4e-15, atol=1e-14
    )


def test_every_formula_is_evaluated_on_a_device() -> None:
    assert {schedule.formula for schedule in schedules(0.4)} == set(FORMULAS)
