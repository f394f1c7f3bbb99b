"""What surrounds the simulator: its results are its own, and nothing here runs it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import gpuopt
from bench.simulated.__main__ import names_of
from bench.simulated.expected import expect, largest_error
from bench.simulated.replay import BEGIN, END, in_known_words
from bench.simulated.results import COMMAND, PAGE, read, with_tables
from bench.simulated.simulate import FIRST_ADDRESS, record_step
from bench.simulated.simulator import change, find
from bench.simulated.statistics import Simulated, read_launches
from bench.simulated.tasks import SETS, TASKS, Copy, Dense, Sparse

# Two channels of memory; what they count goes on from launch to launch.
LOG = f"""
{BEGIN} gpuopt::count_digits<int>
gpu_sim_cycle = 100
n_cmd=7 n_act=2 n_rd=10 n_rd_L2_A=99 n_write=3 n_wr_bk=1 bw_util=0.5
n_cmd=7 n_act=1 n_rd=20 n_rd_L2_A=99 n_write=0 n_wr_bk=0 bw_util=0.5
{END}
{BEGIN} gpuopt::move_rows<int, unsigned int>
gpu_sim_cycle = 50
n_cmd=7 n_act=5 n_rd=11 n_rd_L2_A=99 n_write=3 n_wr_bk=1 bw_util=0.5
n_cmd=7 n_act=1 n_rd=20 n_rd_L2_A=99 n_write=2 n_wr_bk=0 bw_util=0.5
{END}
"""


def test_statistics_are_those_of_each_launch() -> None:
    assert read_launches(LOG) == [
        Simulated("count_digits<int>", 100, 32 * 34, 3),
        Simulated("move_rows<int, unsigned int>", 50, 32 * 3, 3),
    ]


def test_a_launch_that_does_not_end_is_refused() -> None:
    with pytest.raises(ValueError, match="move_rows<int, unsigned int> has not ended"):
        read_launches(LOG.rpartition(END)[0])


def test_a_changed_configuration_differs_in_what_was_changed() -> None:
    config = "-gpgpu_n_clusters 80\n-gpgpu_n_mem 32\n-gpgpu_n_mem_per_ctrlr 1\n"
    changed = change(config, {"gpgpu_n_mem": 8})
    assert changed == "-gpgpu_n_clusters 80\n-gpgpu_n_mem 8\n-gpgpu_n_mem_per_ctrlr 1\n"


def test_an_option_that_the_simulator_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no option gpgpu_n_mem"):
        change("-gpgpu_n_memory 32\n", {"gpgpu_n_mem": 8})


def test_instructions_that_the_simulator_lacks_are_replaced() -> None:
    ptx = "shfl.sync.up.b32 %r1|%p2, %r3, 1, 0, -1;\nbfind.shiftamt.u32 %r4, %r5;\n"
    assert in_known_words(ptx) == "shfl.sync.up.b32 %r1, %r3, 1, 0, -1;\nclz.b32 %r4, %r5;\n"


def test_a_missing_simulator_is_named_with_what_builds_it(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"libcudart.so is missing: .* build"):
        find(tmp_path)


def test_names_of_sets_are_those_of_their_tasks() -> None:
    assert names_of(["sparse_16384", "sparse", "adam_524288"]) == ["sparse_16384", "adam_524288"]
    assert names_of(list(SETS)) == list(dict.fromkeys(n for names in SETS.values() for n in names))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no set or task adam_1;"):
        names_of(["dense", "adam_1"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["adam", "momentum", "adagrad"])
def test_results_cover_each_optimizer_and_dtype(name: str, dtype: str) -> None:
    dense, sparse = TASKS[f"{name}_{dtype}"], TASKS[f"sparse_{name}_{dtype}"]
    assert isinstance(dense, Dense)
    assert isinstance(sparse, Sparse)
    assert dense.dtype == sparse.dtype == dtype
    assert dense.optimizer == sparse.optimizer
    assert {f"{name}_{dtype}", f"sparse_{name}_{dtype}"} <= set(SETS["results"])


def test_a_copy_moves_as_many_bytes_as_its_step() -> None:
    # Of each element: the gradient is read, and the variable, m and v are read and written.
    assert TASKS["copy_of_adam_524288"] == Copy(7 * 4 * 524_288)


@pytest.mark.parametrize("name", [name for name in SETS["results"] if "float32" in name])
def test_expected_results_are_those_of_steps_on_the_cpu(name: str) -> None:
    task = TASKS[name]
    assert not isinstance(task, Copy)
    given = task.draw()
    got = _second_step(task, given)
    for key, expected in expect(task.optimizer, given, 2).items():
        assert largest_error(got[key], expected, given[key]) <= 1, key


def test_a_wrong_result_has_an_error_above_what_is_allowed() -> None:
    before = np.array([0.5, 2.0], np.float32)
    right = np.array([0.5 + 2**-20, 2.0])
    assert largest_error(before, right, before) <= 1
    assert largest_error(before, right + np.array([0, 2**-15]), before) > 1


def test_the_page_has_the_tables_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, f"the page is not of these results: run {COMMAND}"


def test_all_simulated_results_are_right() -> None:
    tasks = read()
    assert set(tasks) == set(TASKS)
    assert [name for name, task in tasks.items() if task["largest_error"] > 1] == []


@pytest.mark.gpu
@pytest.mark.driver
def test_a_recorded_step_finds_its_arrays_in_memory(tmp_path) -> None:
    task = TASKS["momentum_float32"]
    assert isinstance(task, Dense)
    given = task.draw()
    record_step(task, given, tmp_path)
    recorded = json.loads((tmp_path / "launches.json").read_text())
    [launch] = recorded["launches"]
    assert launch["kernel"] == "gpuopt::dense_update<gpuopt::Momentum, float>"
    assert [launch["kernel"]] in [source["kernels"] for source in recorded["sources"]]
    assert recorded["begin"] == FIRST_ADDRESS
    memory = (tmp_path / "memory.bin").read_bytes()
    names = {f"{name}{i}" for name in ("table", "momentum") for i in range(len(task.sizes))}
    assert set(recorded["arrays"]) == names
    for name, address in recorded["arrays"].items():
        begin = address - FIRST_ADDRESS
        assert memory[begin:].startswith(given[name].tobytes()), name


def _second_step(task: Dense | Sparse, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns each variable and slot after a second step on the CPU."""
    optimizer = getattr(gpuopt, task.optimizer.name)(**task.optimizer.arguments)
    arrays, pairs = {}, []
    for i in range(sum(key.startswith("table") for key in given)):
        arrays[f"table{i}"] = given[f"table{i}"].copy()
        grad = given[f"grad{i}"]
        if f"rows{i}" in given:
            grad = gpuopt.IndexedSlices(grad, given[f"rows{i}"])
        pairs.append((grad, gpuopt.Variable(arrays[f"table{i}"], copy=False)))
    optimizer.apply_gradients(pairs)  # makes the slots
    for slot in task.optimizer.slots:
        for i, (_, variable) in enumerate(pairs):
            arrays[f"{slot}{i}"] = optimizer.get_slot(variable, slot).storage
    for key, array in arrays.items():
        array[...] = given[key]
    optimizer.apply_gradients(pairs)
    return arrays
