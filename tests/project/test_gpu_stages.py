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
    make_stages_table,
    record_steps,
)
from bench.gpu_timing import GPUS
from bench.page import replace_between

H200 = GPUS["H200"]
STALE = f"the counts are not of these launches: run {COMMAND}"
# Those that read gradients before the update.
MEASURING = {"clip_norm", "on_nonfinite", "loss_scale"}
# Of these, what a step launches, and the bytes that it moves an element: `w` is the variable, `m`
# and `v` its slots, `g` the gradient.
UPDATE, OF_GROUPS = "dense_update", "dense_update_of_groups"
OTHERS: dict[str, tuple[list[str], float]] = {
    # g w m v; g, and w m v twice
    "cautious": (["sum_terms", OF_GROUPS], 16 + 28),
    "cautious, clip_norm": (["measure", "sum_terms", OF_GROUPS], 4 + 16 + 28),
    # g and the sum; g, and the sum twice; and the step
    "accumulation": ([UPDATE, UPDATE, UPDATE], 8 + 12 + 28),
    "accumulation, clip_norm, decay": ([UPDATE, UPDATE, "measure", OF_GROUPS], 8 + 12 + 4 + 28),
    # g, and the master, m and v twice, and w written
    'masters="float32"': ([UPDATE], 2 + 24 + 2),
    'masters="float32", clip_norm, decay': (["measure", OF_GROUPS], 2 + 28),
    'masters="float32", loss_scale, clip_norm': (["measure_and_decide", OF_GROUPS], 2 + 28),
    # g, and w, the remainder, m and v twice
    'masters="remainder"': ([UPDATE], 2 + 2 * (2 + 2 + 8)),
    'masters="remainder", clip_norm, decay': (["measure", OF_GROUPS], 2 + 26),
    'masters="remainder", loss_scale, clip_norm': (["measure_and_decide", OF_GROUPS], 2 + 26),
    # all of 16 bits
    "stochastic_rounding": ([UPDATE], 14),
    "stochastic_rounding, clip_norm, decay": (["measure", OF_GROUPS], 2 + 14),
    # g, and w, two codes, and of 256 elements two scales, twice
    "slot_bits=8": (["coded_update"], 4 + 2 * (4 + 2 + 8 / 256)),
    "slot_bits=8, clip_norm, decay": (["measure", "coded_update"], 4 + 4 + 2 * (4 + 2 + 8 / 256)),
}
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
@pytest.mark.parametrize("name", [name for name in STEPS if name not in OTHERS])
def test_gradients_are_read_twice_and_all_else_once(name: str) -> None:
    stages = set(STEPS[name])
    counted = count(recorded().launches[name])
    update = "dense_update" + (
        "_of_groups" if stages & {*MEASURING, "clip_value", "groups"} else ""
    )
    if stages & MEASURING:
        gpu_decides = not stages.isdisjoint({"loss_scale", "on_nonfinite"})
        assert counted.launches == ["measure_and_decide" if gpu_decides else "measure", update]
    else:
        assert counted.launches == [update]
    assert counted.waits == 0
    gradients = 2 if stages & MEASURING else 1
    states = 3 + ("averages" in stages)  # the variable and its slots, read and written
    assert counted.num_bytes == ELEMENTS * FLOAT * (gradients + 2 * states)


@pytest.mark.gpu
@pytest.mark.driver
@pytest.mark.parametrize("name", OTHERS)
def test_types_and_sums_move_what_they_store(name: str) -> None:
    counted = count(recorded().launches[name])
    launches, per_element = OTHERS[name]
    assert counted == (launches, 0, ELEMENTS * per_element)


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
    for name in STEPS:
        counted = count(recorded().launches[name])._asdict()
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
