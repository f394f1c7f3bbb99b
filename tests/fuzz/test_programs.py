"""Random programs of everything beside a naive model, on the CPU and with two emulated GPUs."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from fuzzing import model, program
from fuzzing.settings import GPUS, HOST, NUMBERS, long_run, run_for_a_while, seeds

# Random programs have any variables.
pytestmark = pytest.mark.filterwarnings("ignore:three calls in a row")


@pytest.mark.parametrize("seed", seeds(24))
def test_a_random_program_on_the_host_does_what_the_model_does(seed: int) -> None:
    program.run(seed, NUMBERS, HOST)


@long_run
def test_many_random_programs_on_the_host_do_what_the_model_does(part: int) -> None:
    run_for_a_while(partial(program.run, devices=HOST))


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", seeds(8))
def test_a_random_program_on_gpus_does_what_the_model_does(seed: int) -> None:
    program.run(seed, NUMBERS, GPUS)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@long_run
def test_many_random_programs_on_gpus_do_what_the_model_does(part: int) -> None:
    run_for_a_while(partial(program.run, devices=GPUS))


def test_a_failing_program_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = model.Momentum.rule

    def wrong(self: Any, w: Any, g: Any, *slots: Any, rate: float) -> None:
        rule(self, w, 2 * g, *slots, rate=rate)

    monkeypatch.setattr(model.Momentum, "rule", wrong)
    with pytest.raises(AssertionError, match=" is not ") as first:
        program.run(0, range(40), HOST)
    [note] = first.value.__notes__
    command = re.search("GPUOPT_FUZZ_SEED=0 GPUOPT_FUZZ_ONLY=([0-9,]+) make test ARGS", note)
    assert command is not None
    numbers = [int(number) for number in command[1].split(",")]
    assert "Momentum" in note.splitlines()[-3]
    with pytest.raises(AssertionError) as second:
        program.run(0, numbers, HOST)
    assert str(second.value) == str(first.value)
