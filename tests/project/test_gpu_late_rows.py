"""A step whose other rows catch up is modelled beside LazyAdam's."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu_late_rows import (
    COMMAND,
    RESULT,
    STEPS,
    data_of_steps,
    kernels_of,
    make_late_table,
    record_steps,
)
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import read
from bench.gpu_timing import GPUS
from bench.page import replace_between

STALE = f"the step is not this checkout's: run {COMMAND}"


@pytest.mark.gpu
@pytest.mark.driver
def test_the_written_launches_are_those_of_this_checkout() -> None:
    launches = record_steps(GPUS["H200"]).launches
    steps: dict[str, Any] = read(RESULT)["steps"]
    for name in STEPS:
        assert kernels_of(launches[name]) == steps[name]["launches"], STALE
    lazy, late = (kernels_of(launches[name]) for name in STEPS)
    assert late == [*lazy[:-2], "late_update", lazy[-1]]


def test_a_row_that_is_behind_costs_a_number_of_steps_and_what_it_catches_up_by() -> None:
    lazy, late = (read(RESULT)["steps"][name] for name in STEPS)
    # The number, in a sector of 32 bytes, is read and written; from L2 come sums, the sizes of one
    # step and a half, and two powers of two slots' decays. A step is added to every fourth of 308.
    of_row, of_count = 2 * 32 + 32 + 6 + 4 * 8, 3 * 32 * 77
    expected = lazy["num_bytes"] + of_row * data_of_steps().different + of_count
    assert late["num_bytes"] == expected
    for short in GPUS:
        assert late["modelled_us"][short] <= 1.5 * lazy["modelled_us"][short]


def test_the_page_has_the_written_results() -> None:
    page = PAGE.read_text()
    assert page == replace_between(page, COMMAND, make_late_table(read(RESULT))), STALE
