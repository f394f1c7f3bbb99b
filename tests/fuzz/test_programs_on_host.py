"""Random programs of everything on the CPU, beside a naive model: see tests/support/fuzzing."""

from __future__ import annotations

from functools import partial

import pytest
from fuzzing import program
from fuzzing.settings import HOST, NUMBERS, long_run, run_for_a_while, seeds

# Random programs have any variables.
pytestmark = pytest.mark.filterwarnings("ignore:three calls in a row")


@pytest.mark.parametrize("seed", seeds(24))
def test_a_random_program_does_what_the_model_does(seed: int) -> None:
    program.run(seed, NUMBERS, HOST)


@long_run
def test_many_random_programs_do_what_the_model_does(part: int) -> None:
    run_for_a_while(partial(program.run, devices=HOST))
