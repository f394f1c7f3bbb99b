"""Random programs of steps that GPUs may leave out or refuse, with failures, on late streams."""

from __future__ import annotations

import gc
import secrets
import time

import driver
import pytest
from fuzzing import promises
from fuzzing.settings import PART_S, long_run, seeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.is_here(), reason="a real GPU chooses its order itself"),
    pytest.mark.filterwarnings("ignore:three calls in a row"),  # random programs have any
]

POLICIES = ("newest", "random", "random", "oldest", "immediate")
PER_TEST = 5


def run(seed: int, num_gpus: int) -> None:
    gc.collect()  # names of the last program's variables
    with driver.schedule(POLICIES[seed % len(POLICIES)], seed):
        promises.run(seed, num_gpus)
        assert driver.take_reports() == [], f"the program of seed {seed}"


@pytest.mark.parametrize("first", seeds(60)[::PER_TEST])
def test_steps_are_made_by_the_count_that_the_gpu_has(first: int) -> None:
    for seed in seeds(60)[first : first + PER_TEST] or [first]:
        run(seed, 1)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("first", seeds(40)[::PER_TEST])
def test_several_gpus_make_steps_by_one_count(first: int) -> None:
    for seed in seeds(40)[first : first + PER_TEST] or [first]:
        run(seed, 2)


@long_run
def test_many_steps_are_made_by_the_count_that_the_gpu_has(part: int) -> None:
    seed = secrets.randbits(40)
    print(f"seeds from {seed}")
    end = time.monotonic() + PART_S
    while time.monotonic() < end:
        run(seed, 1)
        seed += 1
