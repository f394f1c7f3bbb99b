"""Random programs on GPUs of the stub driver, whose streams run late."""

from __future__ import annotations

from functools import partial

import driver
import pytest
from fuzzing import on_streams, promises
from fuzzing.settings import long_run, on_late_streams, run_for_a_while, seeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.is_here(), reason="a real GPU chooses its order itself"),
    pytest.mark.filterwarnings("ignore:three calls in a row"),  # random programs have any
]

PER_TEST = 10
of_two_gpus = on_late_streams(on_streams.run)
of_a_count = on_late_streams(partial(promises.run, num_gpus=1))
of_one_count = on_late_streams(partial(promises.run, num_gpus=2))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("first", seeds(300)[::PER_TEST])
def test_two_gpus_do_what_the_model_does(first: int) -> None:
    for seed in seeds(300)[first : first + PER_TEST] or [first]:
        of_two_gpus(seed, range(on_streams.OPERATIONS))


@pytest.mark.gpus(2)
@long_run
def test_two_gpus_do_what_the_model_does_in_many_programs(part: int) -> None:
    run_for_a_while(of_two_gpus)


@pytest.mark.parametrize("first", seeds(120)[::PER_TEST])
def test_steps_are_made_by_the_count_that_the_gpu_has(first: int) -> None:
    for seed in seeds(120)[first : first + PER_TEST] or [first]:
        of_a_count(seed, range(promises.OPERATIONS))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("first", seeds(80)[::PER_TEST])
def test_several_gpus_make_steps_by_one_count(first: int) -> None:
    for seed in seeds(80)[first : first + PER_TEST] or [first]:
        of_one_count(seed, range(promises.OPERATIONS))


@long_run
def test_many_steps_are_made_by_the_count_that_the_gpu_has(part: int) -> None:
    run_for_a_while(of_a_count)
