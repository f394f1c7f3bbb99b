"""Jobs that mpiexec starts: they do what all communicators do, and end as promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from guide_scripts import scripts_under
from mpi_job import ROOT, check_that_a_forked_child_is_no_rank, run_alone, run_job

from gpuopt.distributed.communicators.mpi_description import describe_mpi

pytestmark = pytest.mark.mpi


def test_a_job_has_no_network_but_the_loopback_device() -> None:
    job = run_job(1, "-c", "import socket; print([name for _, name in socket.if_nameindex()])")
    assert job.output.strip() == "['lo']", job


def test_what_every_communicator_does_is_done_over_mpi() -> None:
    tests = ROOT / "tests" / "distributed" / "test_communicator.py"
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    job = run_job(3, "-m", "pytest", *options, tests)
    assert job.status == 0, job
    assert job.output.count(" passed") == 3, job


def test_the_demo_trains_on_all_ranks_and_prints_one_table(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    options = [
        "--ranks",
        "--optimizer",
        "Adam",
        "--device",
        "cpu",
        "--steps",
        "60",
        "--output",
        str(picture),
    ]
    job = run_job(2, "-m", "mpi4py", "-m", "gpuopt", "demo", *options)
    assert job.status == 0, job
    [row] = re.findall(r"cpu .* Adam .* (\d+\.\d)% .* (\d+\.\d)%", job.output)
    assert float(row[0]) > 90, job  # of the training images
    assert job.output.count("part of a step") == 1, job
    assert "--ranks" not in job.errors, job


def test_the_demo_without_ranks_says_once_that_all_train_alone(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    options = ["--optimizer", "Adam", "--device", "cpu", "--steps", "20", "--output", str(picture)]
    job = run_job(2, "-m", "gpuopt", "demo", *options)
    assert job.status == 0, job
    assert job.output.count("part of a step") == 2, job
    assert job.errors.count("gpuopt demo: each of 2 processes trains by itself") == 1, job
    assert job.errors.count("with --ranks they train together") == 1, job


def test_the_demo_trains_on_a_chief_and_workers(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    options = ["--ranks", "workers", "--optimizer", "Adam", "--device", "cpu", "--steps", "60"]
    options += ["--output", str(picture)]
    job = run_job(3, "-m", "mpi4py", "-m", "gpuopt", "demo", *options)
    assert job.status == 0, job
    [row] = re.findall(r"cpu .* Adam .* (\d+\.\d)% .* (\d+\.\d)%", job.output)
    assert float(row[0]) > 90, job  # of the training images
    assert job.output.count("part of a step") == 1, job
    assert len(re.findall(r"\b60 .* 0 .* s\b", job.output)) == 2, job  # a line for each worker


def test_the_guides_script_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    [script] = scripts_under("From one process to several")
    file = tmp_path / "train.py"
    outputs = []
    for steps in ("< 100", "< 101"):
        file.write_text(script.replace("< 100", steps))
        job = run_job(2, file, folder=tmp_path)
        assert job.status == 0, job
        [values] = re.findall(r"\[(.*)\]", job.output)
        outputs.append([float(value) for value in values.split()])
    assert outputs[0] == pytest.approx([1, -2, 3, 0.5], abs=0.5)
    assert {file.stem for file in tmp_path.glob("model*")} == {"model-100", "model-101"}


def test_the_guides_workers_train_and_go_on_from_the_chiefs_checkpoint(tmp_path: Path) -> None:
    [script] = scripts_under("A chief and workers")
    file = tmp_path / "train.py"
    file.write_text(script)
    for num_checkpoints in (2, 3):
        job = run_job(3, file, folder=tmp_path)
        assert job.status == 0, job
        [values] = re.findall(r"\[(.*)\]", job.output)
        assert [float(value) for value in values.split()] == pytest.approx([1, -2, 3, 0.5], abs=0.5)
        assert len(re.findall(r"worker \d: \d+ accepted", job.output)) == 2, job
        assert len(list(tmp_path.glob("model-*"))) == num_checkpoints


def run_workers(script: str, tmp_path: Path) -> str:
    """Runs a script of the guide in three processes, which fits; returns what it prints."""
    file = tmp_path / "train.py"
    file.write_text(script)
    job = run_job(3, file, folder=tmp_path)
    assert job.status == 0, job
    [values] = re.findall(r"\[(.*)\]", job.output)
    assert [float(value) for value in values.split()] == pytest.approx([1, -2, 3, 0.5], abs=0.5)
    return job.output


def test_the_guides_workers_that_wait_for_nobody_train(tmp_path: Path) -> None:
    [script] = scripts_under("Workers that wait for nobody")
    output = run_workers(script, tmp_path)
    counts = re.findall(r"worker \d: (\d+) accepted, (\d+) too late", output)
    assert [int(accepted) + int(stale) for accepted, stale in counts] == [50, 50], output


def test_the_guides_workers_that_train_by_themselves_meet_at_a_center(tmp_path: Path) -> None:
    [script] = scripts_under("Workers that train by themselves")
    run_workers(script, tmp_path)


def test_mpi_is_described_without_being_started() -> None:
    expected = r"usable: mpi4py 4\.\S+, (Open MPI|MPICH).* v?\d+\.\S+, does not take GPUs' memory"
    assert re.fullmatch(expected, describe_mpi())
    loaded = run_alone(
        "from gpuopt.distributed.communicators.mpi_description import describe_mpi\n"
        "describe_mpi()\n"
        "import sys; print('mpi4py.MPI' in sys.modules)"
    )
    assert loaded == "False"


def test_a_process_of_no_job_is_a_group_of_one() -> None:
    program = "from gpuopt.distributed import *; print(MPIGroup(9).run(lambda c: c.all_gather(1)))"
    assert run_alone(program) == "[[1]]"


def test_processes_of_an_mpi_that_knows_one_of_them_are_refused() -> None:
    """As under torchrun, or another MPI's launcher."""
    program = """
import os
from gpuopt.distributed import MPIGroup
os.environ.update(RANK="1", WORLD_SIZE="2")
try:
    MPIGroup(9)
except RuntimeError as error:
    print(error)
"""
    assert run_alone(program).startswith("MPIGroup finds 1 process, but the environment shows 2 (")


def test_a_forked_child_is_no_rank() -> None:
    check_that_a_forked_child_is_no_rank("MPIGroup(9)")


def test_mpi_for_the_main_thread_alone_is_called_by_no_other() -> None:
    program = """
import threading
import mpi4py
mpi4py.rc.thread_level = "funneled"
from gpuopt.distributed import MPIGroup

def run():
    try:
        group.run(lambda communicator: communicator.barrier())
    except RuntimeError as error:
        print(error)

group = MPIGroup(9)
group.run(lambda communicator: communicator.barrier())
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    assert run_alone(program).startswith("MPI was started for calls of the main thread alone")


def test_ranks_know_whether_their_host_has_a_core_for_each() -> None:
    program = """
import os
from mpi4py import MPI
from gpuopt.distributed import MPIGroup

core = min(os.sched_getaffinity(0)) if MPI.COMM_WORLD.Get_rank() == 0 else None
core = MPI.COMM_WORLD.bcast(core)
ranks = range(MPI.COMM_WORLD.Get_size())
for cores in ({core}, set(range(os.cpu_count()))):
    os.sched_setaffinity(0, cores)
    print(len(cores) >= len(ranks), MPIGroup(20)._exchange.has_core)
"""
    job = run_job(2, "-c", program)
    assert job.status == 0, job
    lines = [line.split() for line in job.output.splitlines()]
    assert len(lines) == 4, job
    assert all(expected == found for expected, found in lines), job
    assert ["False", "False"] in lines, job


def test_ctrl_c_anywhere_in_a_run_leaves_the_group_ready_for_the_next() -> None:
    program = """
import sys
sys.path.append("tests/support")
from interrupt_at import Interrupt, InterruptAt
from gpuopt.distributed import MPIGroup

group = MPIGroup(20)
moment = 0
while True:
    moment += 1
    interrupt = InterruptAt(moment, inside=["gpuopt"])
    try:
        with interrupt:
            group.run(lambda communicator: communicator.barrier())
    except Interrupt:
        pass
    assert group.run(lambda communicator: communicator.all_gather(7)) == [[7]], moment
    if interrupt.left > 0:
        break
print(moment)
"""
    assert int(run_alone(program)) > 20
