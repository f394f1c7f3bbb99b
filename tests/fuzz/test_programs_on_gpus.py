"""Random programs on the CPU and two emulated GPUs, beside a naive model."""

from __future__ import annotations

from functools import partial

import pytest
from fuzzing import program
from fuzzing.settings import GPUS, NUMBERS, long_run, run_for_a_while, seeds

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.usefixtures("emulated_gpus"),
    pytest.mark.filterwarnings("ignore:three calls in a row"),  # random programs have any
]


@pytest.mark.parametrize("seed", seeds(8))
def test_a_random_program_does_what_the_model_does(seed: int) -> None:
    program.run(seed, NUMBERS, GPUS)


@long_run
def test_many_random_programs_do_what_the_model_does(part: int) -> None:
    run_for_a_while(partial(program.run, devices=GPUS))
