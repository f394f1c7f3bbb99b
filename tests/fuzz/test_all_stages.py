"""Random programs of steps with many stages, beside a naive model, on all backends."""

from __future__ import annotations

from collections.abc import Iterable

import driver
import pytest
from fuzzing import all_stages
from fuzzing.settings import NUMBERS, long_run, on_late_streams, run_for_a_while, seeds
from gpu_streams import new_stream


@pytest.mark.parametrize("seed", seeds(60))
def test_stages_do_together_what_a_model_does(seed: int) -> None:
    all_stages.run(seed, NUMBERS)


@long_run
def test_stages_do_what_a_model_does_in_many_programs(part: int) -> None:
    run_for_a_while(all_stages.run)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", seeds(24))
def test_stages_on_emulated_gpus_do_what_a_model_does(seed: int) -> None:
    all_stages.run(seed, NUMBERS[:20], "gpu:0")


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@long_run
def test_stages_on_emulated_gpus_do_what_a_model_does_in_many_programs(part: int) -> None:
    run_for_a_while(lambda seed, _: all_stages.run(seed, NUMBERS[:20], "gpu:0"))


@on_late_streams
def run_on_streams(seed: int, numbers: Iterable[int]) -> None:
    all_stages.run(seed, numbers, "gpu:0", [new_stream() for _ in range(2)])


_needs_driver = pytest.mark.skipif(
    not driver.is_here(), reason="a real GPU chooses its order itself"
)


@_needs_driver
@pytest.mark.gpu
@pytest.mark.parametrize("seed", seeds(16))
def test_stages_on_streams_do_what_a_model_does(seed: int) -> None:
    run_on_streams(seed, NUMBERS[:20])


@_needs_driver
@pytest.mark.gpu
@long_run
def test_stages_on_streams_do_what_a_model_does_in_many_programs(part: int) -> None:
    run_for_a_while(lambda seed, _: run_on_streams(seed, NUMBERS[:20]))
