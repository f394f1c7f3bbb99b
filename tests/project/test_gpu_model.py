"""The model of a GPU's times: its arithmetic, what it is compared with, and its freshness."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from bench.gpu import make_model_table
from bench.gpu_harness import Measured
from bench.gpu_kernels import KERNELS
from bench.gpu_kernels_of_29a79d3 import KERNELS_OF_29A79D3
from bench.gpu_launches import Launch, Resources, read_parameters
from bench.gpu_model import list_tasks, record_tasks
from bench.gpu_model_page import LIMITS, PAGE, REVIEW, with_tables
from bench.gpu_modelled import (
    COMMAND,
    OURS,
    REVIEWED,
    compute,
    find_model,
    model_workload,
    read,
    read_data,
    read_recorded,
)
from bench.gpu_timing import GPUS, model_step, resident_blocks, waiting_us
from bench.gpu_work import L2, Dense, Rows, Waits, Work
from bench.gpu_workloads import offer_workloads
from bench.harness import ROOT, Timing

STALE = f"the model is not of these launches: run {COMMAND}"
H200 = GPUS["H200"]


# Arithmetic


def work(items: int, item: Waits, items_per_block: int = 1, begin: Waits | None = None) -> Work:
    return Work(0, 0, items, items_per_block, begin or Waits(), item, item, item)


@pytest.mark.parametrize(
    ("grid", "resident", "items", "items_per_block", "us"),
    [
        (1, 100, 1, 1, 0.2),
        (100, 100, 100, 1, 0.2),  # all at once
        (101, 100, 101, 1, 0.4),  # the last block waits for room
        (100, 100, 101, 1, 0.4),  # one block has two items
        (3, 2, 6, 1, 0.8),  # two blocks of two items, then the third
        (2, 2, 8, 4, 0.2),
        (2, 2, 9, 4, 0.4),
    ],
)
def test_blocks_take_turns(
    grid: int, resident: int, items: int, items_per_block: int, us: float
) -> None:
    assert waiting_us(work(items, L2, items_per_block), grid, resident) == pytest.approx(us)


def test_every_block_waits_before_its_first_item() -> None:
    begin = Waits(dram=1)
    assert waiting_us(work(6, L2, begin=begin), 3, 1) == pytest.approx(3 * (0.7 + 2 * 0.2))


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("H200", 256, 46, 0, 5),  # of 65,536 registers
        ("H200", 256, 30, 0, 8),  # of 2,048 threads
        ("H200", 32, 16, 0, 32),
        ("T4", 256, 30, 0, 4),
        ("T4", 32, 16, 0, 16),
        ("T4", 128, 16, 30 << 10, 2),  # of 64 KB
        ("H200", 128, 16, 56 << 10, 4),  # 57 KB each, of 228
    ],
)
def test_blocks_are_resident_as_cudas_occupancy_says(
    gpu: str, threads: int, registers: int, shared_bytes: int, blocks: int
) -> None:
    assert resident_blocks(GPUS[gpu], threads, Resources(registers, shared_bytes)) == blocks


def step(launch: Launch, data: Any, registers: int = 32) -> float:
    [modelled] = model_step([launch], data, H200, {launch.kernel: Resources(registers, 0)})
    return modelled.us


def dense(chunks: int, block: int) -> Launch:
    arguments = {"num_chunks": chunks, "chunk_size": 1024}
    return Launch("dense_update<Adam, float>", chunks, block, arguments, 0)


def test_a_small_dense_step_waits_for_the_chunk_its_variable_and_the_data() -> None:
    assert step(dense(1, 32), Dense(64, 2)) == pytest.approx(0.8 + 0.4 + 0.2 + 0.2 + 0.7, abs=0.01)


def test_a_large_dense_step_takes_its_bytes() -> None:
    elements = 2**30
    us = 28e6 * elements / (0.85 * 4.8e12)
    assert step(dense(2**20, 256), Dense(elements, 2)) == pytest.approx(us, rel=0.001)


def test_a_hot_row_takes_its_parts_one_after_another() -> None:
    launch = Launch("sparse_update<Adagrad, float, unsigned int>", 1, 128, {"lanes_per_row": 32}, 0)
    [one, two] = (
        KERNELS["sparse_update"](launch, Rows(n, 128, 1, {n: 1})).longest.us for n in (2**15, 2**16)
    )
    # 64 stretches more, of which eight are in flight.
    assert two - one == pytest.approx(8 * 0.2)


@pytest.mark.parametrize("name", [offer.name for offer in offer_workloads(None)])  # type: ignore[arg-type]
def test_bytes_of_memory_are_those_that_the_benchmark_counts(name: str) -> None:
    result = read(OURS)
    data = read_data(result, name)
    launches = read_recorded(result, "H200").launches[name]
    works = [
        KERNELS[launch.kernel.partition("<")[0]](launch, data)
        for launch in launches
        if not launch.copied_bytes
    ]
    state = 2 * (1 + data.slots)
    if isinstance(data, Rows):
        given = data.num_rows * (4 * data.width + 8)
        expected = given + 4 * state * data.different * data.width
    else:
        expected = 4 * (1 + state) * data.elements
    assert sum(work.num_bytes for work in works) == pytest.approx(expected)


def test_a_copy_takes_its_time_alone() -> None:
    assert step(Launch("device to host", 0, 0, {}, 16), Dense(1, 1)) == 2.0


def test_parameters_are_read_from_the_kernels_sources() -> None:
    parameters = read_parameters(ROOT / "kernels")
    assert {launch.partition("<")[0] for launch in KERNELS} <= set(parameters)
    assert parameters["count_digits"][2] == "shift"
    assert parameters["dense_update"] == [
        *(None, "num_variables", None, "num_chunks", "chunk_size", None, None, None, None)
    ]


# What it is compared with


@pytest.mark.parametrize("workload", REVIEW)
def test_times_of_29a79d3_are_the_reviews_within_15_percent(workload: str) -> None:
    steps = model_workload(read(REVIEWED), "H200", workload, KERNELS_OF_29A79D3)
    least, most = REVIEW[workload]
    assert 0.85 * least <= sum(each.us for each in steps) <= 1.15 * most


def test_the_hot_row_of_29a79d3_takes_the_reviews_millisecond_within_15_percent() -> None:
    result = read(REVIEWED)
    launches = read_recorded(result, "H200").launches["half_one_row"]
    [update] = (launch for launch in launches if launch.kernel.startswith("sparse_update"))
    data = read_data(result, "half_one_row")
    longest = KERNELS_OF_29A79D3["sparse_update"](update, data).longest
    assert longest.us == pytest.approx(1200, rel=0.15)


def test_a_row_that_is_half_of_a_million_takes_tens_of_microseconds() -> None:
    result = read(OURS)
    launches = read_recorded(result, "H200").launches["half_one_row"]
    data = read_data(result, "half_one_row")
    kernels = [(each.kernel.partition("<")[0], each) for each in launches if each.grid]
    longest = {name: KERNELS[name](launch, data).longest.us for name, launch in kernels}
    assert 10 < longest["sum_pieces"] + longest["sparse_update"] < 100


@pytest.mark.parametrize("workload", LIMITS)
def test_modelled_times_keep_their_limits_on_an_h200(workload: str) -> None:
    steps = model_workload(read(OURS), "H200", workload, KERNELS)
    assert sum(each.us for each in steps) <= LIMITS[workload]


# That it is up to date


def test_the_data_are_the_benchmarks() -> None:
    result = read(OURS)
    tasks = list_tasks()
    assert set(result["data"]) == set(tasks), STALE
    assert {name: read_data(result, name) for name in tasks} == {
        name: task.data for name, task in tasks.items()
    }, STALE


@pytest.mark.parametrize(
    ("path", "kernels"), [(OURS, KERNELS), (REVIEWED, KERNELS_OF_29A79D3)], ids=["ours", "29a79d3"]
)
def test_results_are_what_the_model_computes(path: Any, kernels: Any) -> None:
    result = read(path)
    assert "nothing in this file was measured" in result["what"].lower()
    assert result["modelled"] == compute(result, list(result["modelled"]), kernels), STALE


def test_the_pages_tables_are_of_the_results() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), STALE
    assert page.count("modelled") > len(GPUS)


@pytest.mark.gpu
@pytest.mark.driver
def test_the_recorded_launches_are_those_of_this_checkout() -> None:
    recorded = record_tasks(list_tasks(), H200.multiprocessors, H200.architecture)
    assert recorded.launches == read_recorded(read(OURS), "H200").launches, STALE


# Beside what is measured


def test_every_workload_has_a_model_on_every_gpu() -> None:
    for gpu in GPUS.values():
        for offer in offer_workloads(None):  # type: ignore[arg-type]
            assert find_model(gpu.name, offer.name)["modelled_us"] > 0


def test_other_gpus_and_workloads_have_none() -> None:
    assert find_model("NVIDIA RTX A6000", "gpu_adam_160m") == {
        "no_model": "there is no model of NVIDIA RTX A6000, only of NVIDIA H100 80GB HBM3, "
        "NVIDIA H200, NVIDIA A100-SXM4-80GB, Tesla T4"
    }
    assert COMMAND in find_model("Tesla T4", "gpu_new")["no_model"]


def printed(gpu: str) -> str:
    """The table of a GPU on which, the test pretends, a step took 7 microseconds."""
    timing = Timing(0.007, 0, 0, 1.0, 0, 1.0, 0.95, None, None, [])
    measured = Measured(timing, timing, 100, 1.0, True)
    workload = "gpu_adam_10000x64_same"
    found: dict[str, Any] = {
        workload: {"contenders": {"gpuopt": measured}, **find_model(gpu, workload)},
        "gpu_adam_160m": {"not_run": "too large"},
    }
    console = Console(file=io.StringIO(), width=200)
    console.print(make_model_table(gpu, found))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_measured_time_stands_beside_the_modelled_one() -> None:
    modelled = find_model("NVIDIA H200", "gpu_adam_10000x64_same")["modelled_us"]
    text = printed("NVIDIA H200")
    [row] = [line for line in text.splitlines() if "10000x64" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")[1:]] == [
        "7.0",
        f"{modelled:.1f}",
        f"{7 / modelled:.2f}",
    ]
    [row] = [line for line in text.splitlines() if "160m" in line]
    assert "not run" in row


def test_of_another_gpu_the_table_says_that_there_is_no_model() -> None:
    text = printed("Some GPU")
    assert "no model" in text
    assert "there is no model of Some GPU" in text
    assert "7.0" in text
