"""A step with stages is counted: its launches, the host's waits, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
from pairs_of_stages import PAIRS

from bench.gpu_kernels import FLOAT
from bench.gpu_launches import Recorded
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import read
from bench.gpu_stages import COMMAND, ELEMENTS, RESULT, SHAPES, STEPS, count, record_steps
from bench.gpu_stages_page import make_tables
from bench.gpu_timing import GPUS
from bench.page import replace_between

H200 = GPUS["H200"]
STALE = f"the counts are not of these launches: run {COMMAND}"
# Those that read gradients before the update.
MEASURING = {"clip_norm", "on_nonfinite", "loss_scale"}
# Of these, what a step launches, and the bytes that it moves an element: `w` is the variable, `m`
# and `v` its slots, `g` the gradient.
UPDATE, OF_GROUPS = "dense_update", "dense_update_of_groups"
OF_CODES = 4 + 2 * (4 + 2 + 8 / 256)
OTHERS: dict[str, tuple[list[str], float]] = {
    # g m v; g, and w m v twice
    "cautious": (["sum_terms", OF_GROUPS], 12 + 28),
    "cautious, clip_norm": (["measure", "sum_terms", OF_GROUPS], 4 + 12 + 28),
    # g and the sum; g, and the sum twice; and the step
    "accumulation: the first call": ([UPDATE], 8),
    "accumulation: a call between": ([UPDATE], 12),
    "accumulation: the call that updates": ([UPDATE, UPDATE], 12 + 28),
    "accumulation, clip_norm, decay: the call that updates": (
        ["measure", OF_GROUPS],
        12 + 28,
    ),
    "accumulation, averages: the call that updates": ([UPDATE, UPDATE], 12 + 28 + 8),
    "accumulation, loss_scale: the call that updates": (
        ["measure_and_decide", OF_GROUPS],
        12 + 28,
    ),
    "accumulation, loss_scale, clip_norm, decay, averages: the call that updates": (
        ["measure_and_decide", OF_GROUPS],
        12 + 28 + 8,
    ),
    # all of 16 bits
    "bfloat16": ([UPDATE], 14),
    "bfloat16, clip_norm, decay": (["measure", OF_GROUPS], 2 + 14),
    # g, and the master, m and v twice, and w written
    'masters="float32"': ([UPDATE], 2 + 24 + 2),
    'masters="float32", clip_norm, decay': (["measure", OF_GROUPS], 2 + 28),
    'masters="float32", averages': ([UPDATE], 28 + 8),
    'masters="float32", loss_scale, clip_norm': (["measure_and_decide", OF_GROUPS], 2 + 28),
    # g of 16 bits, and sums of 32
    'masters="float32", accumulation: the first call': ([UPDATE], 2 + 4),
    'masters="float32", accumulation: a call between': ([UPDATE], 2 + 8),
    'masters="float32", accumulation: the call that updates': ([UPDATE, UPDATE], 10 + 4 + 26),
    # g, and w, the remainder, m and v twice
    'masters="remainder"': ([UPDATE], 2 + 2 * (2 + 2 + 8)),
    'masters="remainder", clip_norm, decay': (["measure", OF_GROUPS], 2 + 26),
    'masters="remainder", averages': ([UPDATE], 26 + 8),
    'masters="remainder", loss_scale, clip_norm': (["measure_and_decide", OF_GROUPS], 2 + 26),
    "stochastic_rounding": ([UPDATE], 14),
    "stochastic_rounding, clip_norm, decay": (["measure", OF_GROUPS], 2 + 14),
    "stochastic_rounding, averages": ([UPDATE], 14 + 2 * 2),
    "stochastic_rounding, loss_scale": (["measure_and_decide", OF_GROUPS], 2 + 14),
    "stochastic_rounding, loss_scale, clip_norm, decay, averages": (
        ["measure_and_decide", OF_GROUPS],
        2 + 14 + 2 * 2,
    ),
    # g, and w, two codes, and of 256 elements two scales, twice
    "slot_bits=8": (["coded_update"], OF_CODES),
    "slot_bits=8, clip_norm, decay": (["measure", "coded_update"], 4 + OF_CODES),
    "slot_bits=8, loss_scale": (["measure_and_decide", "coded_update"], 4 + OF_CODES),
    # g, and w, and m and v of 16 bits, twice
    'slot_dtype="bfloat16"': ([UPDATE], 4 + 2 * (4 + 2 + 2)),
    'slot_dtype="bfloat16", clip_norm, decay': (["measure", OF_GROUPS], 4 + 20),
    'slot_dtype="bfloat16", loss_scale': (["measure_and_decide", OF_GROUPS], 4 + 20),
    # and an average of the variable's type, twice
    "bfloat16, averages": ([UPDATE], 14 + 2 * 2),
    "slot_bits=8, averages": (["coded_update"], OF_CODES + 2 * 4),
    'slot_dtype="bfloat16", averages': ([UPDATE], 20 + 2 * 4),
}
# Rules that sum over their own update.
WITH_SUMS = [
    ["cautious"],
    ["cautious", "clip_value"],
    ["cautious", "clip_norm"],
    ["cautious", "clip_norm", "decay", "groups", "averages"],
]
# Rules that sum over variables and gradients: these are read twice, and the slot once.
BY_SUMS = "dense_update_by_sums"
WITH_SUMS_OF_INPUTS: dict[str, tuple[list[str], float]] = {
    # w g; g, and w m twice
    "lars, clip_norm": (["measure_inputs", BY_SUMS], 8 + 20),
    "lars, loss_scale": (["measure_inputs_and_decide", BY_SUMS], 8 + 20),
    "lars, loss_scale, clip_norm, groups": (["measure_inputs_and_decide", BY_SUMS], 8 + 20),
    # w g and the sum, which is written
    "lars, accumulation": (["measure_inputs", BY_SUMS], 16 + 20),
    "lars, accumulation, clip_norm": (["measure_inputs", BY_SUMS], 16 + 20),
    "lars, accumulation, loss_scale": (["measure_inputs_and_decide", BY_SUMS], 16 + 20),
    # the master or w and the remainder, and g; g, and these and m twice, and w written
    "lars, clip_norm, masters": (["measure_inputs", BY_SUMS], 6 + 2 + 16 + 2),
    "lars, clip_norm, remainders": (["measure_inputs", BY_SUMS], 6 + 2 + 16),
}

# Stages that bench/gpu_launches.py knows by another name than tests of pairs.
IN_BENCH = {"slot_bits": "8 bits"}

# Less memory, of which launches and bytes an element do not depend.
SMALLER = [(1 << 20,)] * len(SHAPES)


@cache
def recorded() -> Recorded:
    return record_steps(H200, SMALLER, compiles=False)


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
    steps = {"+".join(stages): stages for stages in WITH_SUMS}
    found = record_steps(H200, SMALLER, steps, compiles=False).launches
    for name, stages in steps.items():
        assert not [each for each in found[name] if each.copied_bytes], name
        # The sums, and the update; and the norm before.
        assert len(found[name]) == (3 if "clip_norm" in stages else 2), found[name]


@pytest.mark.gpu
@pytest.mark.driver
def test_sums_of_inputs_take_no_launch_more_than_a_norm() -> None:
    steps = {name: name.split(", ") for name in WITH_SUMS_OF_INPUTS}
    found = record_steps(H200, steps=steps, compiles=False).launches
    for name, (launches, per_element) in WITH_SUMS_OF_INPUTS.items():
        assert count(found[name]) == (launches, 0, ELEMENTS * per_element), name


def expected_of(stages: Collection[str]) -> tuple[list[str], float]:
    """Says which launches a step of Adam with stages takes, and the bytes that an element moves."""
    has_masters, has_remainders = "masters" in stages, "remainders" in stages
    is_of_32_bits = not {"masters", "remainders", "rounding"} & {*stages}
    var = 4 if is_of_32_bits else 2
    # As it is averaged: a variable and its remainder are as many as a master copy.
    whole = 4 if has_masters or has_remainders else var
    slots = 2.0 * (2 if "slot_dtype" in stages else whole)
    if "8 bits" in stages:
        slots = 2 * (1 + 4 / 256)
    gradient = 4 if "accumulation" in stages else var
    launches, num_bytes = [], 0.0
    decides = bool({"loss_scale", "growing_scale", "on_nonfinite"} & {*stages})
    measures = decides or "clip_norm" in stages
    if measures:
        launches.append("measure_and_decide" if decides else "measure")
    if "accumulation" in stages:  # the gradient, and the sum twice
        num_bytes += var + 2 * gradient
        if not measures:
            launches.append(UPDATE)
    elif measures:
        num_bytes += gradient
    if "cautious" in stages:
        launches.append("sum_coded_terms" if "8 bits" in stages else "sum_terms")
        num_bytes += gradient + slots
    of_groups = decides or bool({"clip_norm", "clip_value", "cautious", "groups"} & {*stages})
    of_elements = OF_GROUPS if of_groups else UPDATE
    launches.append("coded_update" if "8 bits" in stages else of_elements)
    num_bytes += gradient + 2 * (whole + slots) + var * has_masters
    if "averages" in stages:
        num_bytes += 2 * whole
    return launches, num_bytes


@pytest.mark.gpu
@pytest.mark.driver
def test_each_pair_of_stages_reads_gradients_twice_and_all_else_once() -> None:
    pairs = {"+".join(pair): [IN_BENCH.get(each, each) for each in pair] for pair in PAIRS}
    found = record_steps(H200, SMALLER, pairs, compiles=False).launches
    for name, stages in pairs.items():
        launches, per_element = expected_of(stages)
        assert count(found[name]) == (launches, 0, ELEMENTS * per_element), name


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
    assert replace_between(page, COMMAND, make_tables(read(RESULT))) == page, STALE
