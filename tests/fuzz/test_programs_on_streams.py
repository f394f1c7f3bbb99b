"""Random programs on two GPUs of the stub driver, whose streams run late."""

from __future__ import annotations

import secrets
import time

import driver
import pytest
from fuzzing import on_streams
from fuzzing.settings import PART_S, long_run, seeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(2),
    pytest.mark.skipif(not driver.is_here(), reason="a real GPU chooses its order itself"),
    pytest.mark.filterwarnings("ignore:three calls in a row"),  # random programs have any
]

POLICIES = ("newest", "random", "random", "oldest")
PER_TEST = 10


def run(seed: int) -> None:
    with driver.schedule(POLICIES[seed % len(POLICIES)], seed):
        on_streams.run(seed)
        assert driver.take_reports() == [], f"the program of seed {seed}"


@pytest.mark.parametrize("first", seeds(300)[::PER_TEST])
def test_random_programs_do_what_the_model_does(first: int) -> None:
    for seed in seeds(300)[first : first + PER_TEST] or [first]:
        run(seed)


@long_run
def test_many_random_programs_do_what_the_model_does(part: int) -> None:
    seed = secrets.randbits(40)
    print(f"seeds from {seed}")
    end = time.monotonic() + PART_S
    while time.monotonic() < end:
        run(seed)
        seed += 1
