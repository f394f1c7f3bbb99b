"""A step on a GPU is counted: its launches, the host's waits, and the bytes that it moves."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache

import pytest
from pairs_of_stages import PAIRS

from bench import pages
from bench.launches import (
    DENSE,
    SPARSE,
    Counted,
    Step,
    count,
    count_call,
)

pytestmark = [pytest.mark.internal, pytest.mark.gpu, pytest.mark.driver]

UPDATE = "dense_update"
# With one of these, a GPU decides whether a step is made.
DECIDED = frozenset({"loss_scale", "growing_scale", "on_nonfinite"})
# Rules that sum over variables and gradients: these are read twice, and the slot once. Launches,
# and the bytes of an element: `w` is the variable, `m` its slot, `g` the gradient.
WITH_SUMS_OF_INPUTS: dict[str, tuple[list[str], float]] = {
    # w g; g, and w m twice
    "lars, clip_norm": (["measure_inputs", UPDATE], 8 + 20),
    "lars, loss_scale": (["measure_inputs", UPDATE], 8 + 20),
    "lars, loss_scale, clip_norm, groups": (["measure_inputs", UPDATE], 8 + 20),
    # the gradient, and the sum, which is written, before
    "lars, accumulation": ([UPDATE, "sum_terms", UPDATE], 12 + 8 + 20),
    "lars, accumulation, clip_norm": ([UPDATE, "measure_inputs", UPDATE], 12 + 8 + 20),
    "lars, accumulation, loss_scale": (
        [UPDATE, "measure_inputs", UPDATE],
        12 + 8 + 20,
    ),
    # the master or w and the remainder, and g; g, and these and m twice, and w written
    "lars, clip_norm, masters": (["measure_inputs", UPDATE], 6 + 2 + 16 + 2),
    "lars, clip_norm, remainders": (["measure_inputs", UPDATE], 6 + 2 + 16),
}
# Of the sort of 65,536 rows: three digits of 8 bits tell a million rows apart.
SORT = ["check_and_count_digits", *["move_rows", "count_digits"] * 2, "move_rows"]


@cache
def counted() -> dict[str, Counted]:
    return count({**DENSE, **SPARSE})


def expected_of(stages: Collection[str]) -> tuple[list[str], float]:
    """Says which launches a step of Adam with stages takes, and the bytes that an element moves."""
    has_masters, has_remainders = "masters" in stages, "remainders" in stages
    is_of_32_bits = not {"masters", "remainders", "rounding", "bfloat16"} & {*stages}
    var = 4 if is_of_32_bits else 2
    # A variable and its remainder are as many as a master copy.
    whole = 4 if has_masters or has_remainders else var
    slots = 2.0 * (2 if "slot_dtype" in stages else whole)
    if "slot_bits" in stages:
        slots = 2 * (1 + 4 / 256)
    gradient = 4 if "accumulation" in stages else var
    if "first call" in stages:  # the gradient, and the sum is written
        return [UPDATE], var + gradient
    if "call between" in stages:  # the gradient, and the sum twice
        return [UPDATE], var + 2 * gradient
    launches, num_bytes = [], 0.0
    if "accumulation" in stages:  # as in a call between
        launches.append(UPDATE)
        num_bytes += var + 2 * gradient
    if DECIDED.union(["clip_norm"]) & {*stages}:
        launches.append("measure")
        num_bytes += gradient
    if "cautious" in stages:
        launches.append("sum_coded_terms" if "slot_bits" in stages else "sum_terms")
        num_bytes += gradient + slots
    launches.append("coded_update" if "slot_bits" in stages else UPDATE)
    num_bytes += gradient + 2 * (whole + slots) + var * has_masters
    if "averages" in stages:
        num_bytes += 2 * 4
    return launches, num_bytes


def assert_counted(
    found: Counted, expected: tuple[list[str], float], stages: Collection[str]
) -> None:
    name = ", ".join(stages)
    assert (found.functions, found.bytes_an_element) == expected, name
    # The decision whether a step is made comes back later, and nobody waits for it.
    is_measured = any(each.startswith("measure") for each in found.functions)
    decides = is_measured and bool(DECIDED & {*stages})
    assert (found.copies, found.waits) == (["device to host"] * decides, 0), name


def test_dense_steps_read_gradients_twice_and_all_else_once() -> None:
    for name, step in DENSE.items():
        assert_counted(counted()[name], expected_of(step.stages), step.stages)


def test_pairs_of_stages_read_gradients_twice_and_all_else_once() -> None:
    # Each stage is in one of the few.
    chosen = PAIRS if os.environ.get("GPUOPT_FULL") else PAIRS[::5]
    pairs = {", ".join(pair): Step(pair) for pair in chosen}
    for name, found in count(pairs).items():
        assert_counted(found, expected_of(pairs[name].stages), pairs[name].stages)


def test_sums_of_inputs_take_no_launch_more_than_a_norm() -> None:
    found = count({name: Step(name.split(", ")) for name in WITH_SUMS_OF_INPUTS})
    for name, expected in WITH_SUMS_OF_INPUTS.items():
        assert_counted(found[name], expected, name.split(", "))


@pytest.mark.parametrize("num_sets", [1, 3])
def test_all_tensors_are_updated_by_one_launch_without_a_copy(num_sets: int) -> None:
    shapes = [(64,), (3, 5), (1024,)] * 300
    [found] = count({"many": Step(["plain"], shapes, num_sets)}).values()
    assert found == ([found.kernels[0]], [], 0)


def test_a_wait_of_the_host_is_counted() -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.empty(3)
    assert count_call(lambda: array.fill(0)).waits == 0
    found = count_call(array.get)
    assert (found.copies, found.waits) == (["device to host"], 1)


@pytest.mark.parametrize("name", ["LazyAdam", "Adagrad"])
def test_rows_are_sorted_and_updated_and_the_host_reads_the_flag_later(name: str) -> None:
    found = counted()[name]
    assert found.functions == [*SORT, "sum_pieces", "sparse_update"]
    assert (found.copies, found.waits) == (["device to host"], 0)


def test_rows_that_catch_up_take_no_launch_more_than_lazyadams() -> None:
    found, lazy = counted()["Adam, whose other rows catch up"], counted()["LazyAdam"]
    assert found.functions == [*lazy.functions[:-1], "late_update"]
    assert (found.copies, found.waits) == (lazy.copies, 0)


def test_ten_tables_are_sorted_and_updated_together() -> None:
    found = counted()["LazyAdam, 10 such tables"]
    digits = ["count_digits", "move_rows"] * 3
    assert found.functions == ["check_rows", "gather_rows", *digits, "sum_pieces", "sparse_update"]
    assert found.waits == 0


def test_the_page_has_the_counts_of_this_checkout() -> None:
    written = pages.make_launches_tables(counted())
    assert pages.read_part("launches") == f"{written}\n", "run .venv/bin/python -m bench.launches"
