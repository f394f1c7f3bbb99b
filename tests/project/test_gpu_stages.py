"""A step with stages is counted: its launches, the host's waits, and the bytes that it moves."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from bench.gpu_kernels import FLOAT
from bench.gpu_launches import Recorded, record
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import read
from bench.gpu_stages import (
    COMMAND,
    ELEMENTS,
    RESULT,
    SHAPES,
    STEPS,
    TORCH_OF,
    count,
    count_torch,
    data_of,
    make_stages_table,
    record_steps,
)
from bench.gpu_timing import GPUS
from bench.page import replace_between

H200 = GPUS["H200"]
STALE = f"the counts are not of these launches: run {COMMAND}"
# Those that read gradients before the update.
MEASURING = {"clip_norm", "on_nonfinite", "loss_scale"}
# Rules that sum over their own update.
WITH_SUMS = [
    ["cautious"],
    ["cautious", "clip_value"],
    ["cautious", "clip_norm"],
    ["cautious", "clip_norm", "decay", "groups", "averages"],
]


@cache
def recorded() -> Recorded:
    return record_steps(H200)


@pytest.mark.gpu
@pytest.mark.driver
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_read_twice_and_all_else_once(name: str) -> None:
    stages = set(STEPS[name])
    counted = count(recorded().launches[name], data_of(STEPS[name]))
    update = "dense_update" + (
        "_of_groups" if stages & {*MEASURING, "clip_value", "groups"} else ""
    )
    # The host decides about a step that also moves averages, and for `on_nonfinite`: for one wait.
    host_decides = "on_nonfinite" in stages or stages >= {"loss_scale", "averages"}
    if stages & MEASURING:
        if stages & MEASURING == {"on_nonfinite"}:  # the factor is no part of the update
            update = "dense_update"
        gpu_decides = "loss_scale" in stages and not host_decides
        assert counted.launches == ["measure_and_decide" if gpu_decides else "measure", update]
    else:
        assert counted.launches == [update]
    assert counted.waits == host_decides
    gradients = 2 if stages & MEASURING else 1
    states = 3 + ("averages" in stages)  # the variable and its slots, read and written
    assert counted.num_bytes == ELEMENTS * FLOAT * (gradients + 2 * states)


@pytest.mark.gpu
@pytest.mark.driver
def test_a_rule_with_sums_takes_a_launch_more() -> None:
    tasks = {
        "+".join(stages): {"job": "adam", "shapes": SHAPES, "num_sets": 1, "stages": stages}
        for stages in WITH_SUMS
    }
    found = record(tasks, H200.multiprocessors, H200.architecture).launches
    for name, stages in zip(tasks, WITH_SUMS, strict=True):
        assert not [each for each in found[name] if each.copied_bytes], name
        # The sums, and the update; and the norm before.
        assert len(found[name]) == (3 if "clip_norm" in stages else 2), found[name]


@pytest.mark.gpu
@pytest.mark.driver
def test_the_written_counts_are_those_of_this_checkout() -> None:
    steps: dict[str, Any] = read(RESULT)["steps"]
    assert steps.keys() == STEPS.keys(), STALE
    for name, stages in STEPS.items():
        counted = count(recorded().launches[name], data_of(stages))._asdict()
        assert {key: steps[name][key] for key in counted} == counted, STALE


def test_the_pages_table_is_of_the_counts() -> None:
    page = PAGE.read_text()
    assert replace_between(page, COMMAND, make_stages_table(read(RESULT))) == page, STALE


def test_torchs_calls_read_gradients_four_times_where_they_are_clipped() -> None:
    per_element = {name: count_torch(calls)[1] / ELEMENTS for name, calls in TORCH_OF.items()}
    # Norm, scaled and written back, and update; the average reads the variable again.
    assert per_element == {
        "decay": 28,
        "decay, averages": 40,
        "clip_norm, decay": 40,
        "clip_norm, decay, averages": 52,
    }
    for step in read(RESULT)["steps"].values():
        assert set(step["modelled_us"]) == set(GPUS)
    result = read(RESULT)
    for name in TORCH_OF:
        ours, theirs = result["steps"][name], result["torch"][name]
        for gpu in GPUS:
            assert ours["modelled_us"][gpu] < theirs["modelled_us"][gpu]
