"""Starts jobs of several processes by mpiexec or torchrun, under a time limit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import gpuopt

ROOT = Path(gpuopt.__file__).parents[1]
LONGEST_JOB_S = 90.0

_ALONE = [sys.executable, str(Path(__file__).with_name("loopback_only.py"))]

# More ranks than cores, and root in a container.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "GLOO_SOCKET_IFNAME": "lo",
    # Pieces of lines of several ranks would be mixed.
    "PYTHONUNBUFFERED": "",
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))),
}

# torchrun, which ends the line before the number of processes of this host. Processes find each
# other by the loopback device: the host's name may be that of another one.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master-addr=127.0.0.1"]
TORCHRUN += ["--master-port=29500", "--no-python", "--nproc-per-node"]


class Job(NamedTuple):
    """What has become of a job."""

    status: int
    output: str
    errors: str
    seconds: float

    def __str__(self) -> str:
        return f"ended with {self.status} after {self.seconds:.1f} s\n{self.output}\n{self.errors}"


def launcher() -> str | None:
    """Finds the mpiexec that belongs to this Python, or else the system's."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@cache
def what_is_missing() -> str | None:
    """Says why no job can be started by mpiexec here; None if one can."""
    if find_spec("mpi4py") is None or launcher() is None:
        return "mpi4py, or mpiexec, is not installed: see make test-ranks"
    return why_no_network()


@cache
def why_no_network() -> str | None:
    """Says why a job cannot have a network of its own here; None if it can."""
    alone = subprocess.run([*_ALONE, "true"], capture_output=True, text=True)
    return None if alone.returncode == 0 else alone.stderr.strip().splitlines()[-1]


def run_job(
    num_ranks: int,
    *arguments: str | Path,
    timeout_s: float = LONGEST_JOB_S,
    folder: Path | None = None,
    packages: Path | None = None,
    while_it_runs: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
    start: Sequence[str] | None = None,
) -> Job:
    """Runs `python ARGUMENTS...` in each rank, in a folder.

    Args:
        num_ranks: How many.
        arguments: Python's.
        timeout_s: When the job is killed.
        folder: Where it runs.
        packages: A folder with packages that are not in this environment.
        while_it_runs: Is given the launcher.
        start: The launcher, less the number of ranks; by default mpiexec.

    Raises:
        TimeoutError: it did not end in time; all of it has been killed.
    """
    if start is None:
        start = [launcher() or "mpiexec", "-n"]
    command = [*_ALONE, *start, str(num_ranks), sys.executable, *map(str, arguments)]
    # A launcher that belongs to a job of its own would take this for a part of it.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_"))
        and name not in ("RANK", "WORLD_SIZE")
    }
    paths = {}
    if packages is not None:
        paths["PYTHONPATH"] = os.pathsep.join([_ENVIRONMENT["PYTHONPATH"], str(packages)])
        # CUDA's libraries are looked for beside the interpreter, and here.
        libraries = [*map(str, packages.glob("nvidia/*/lib")), os.environ.get("LD_LIBRARY_PATH")]
        paths["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    # Into files: a grandchild that is left would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**inherited, **_ENVIRONMENT, **paths},
            cwd=folder,
            start_new_session=True,
        )
        try:
            while_it_runs(process)
            process.wait(timeout_s)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        seconds = time.monotonic() - started
        output.seek(0)
        errors.seek(0)
        job = Job(process.returncode, output.read(), errors.read(), seconds)
    if seconds >= timeout_s:
        raise TimeoutError(f"{command} {job}")
    return job


def run_alone(program: str, *, is_quiet: bool = True) -> str:
    """Runs a program in a process of no job, and returns what it prints.

    Args:
        program: Python's.
        is_quiet: Whether it must print no warnings, as torch does.
    """
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert process.returncode == 0, process
    assert not (is_quiet and process.stderr), process
    return process.stdout.strip()


def check_that_a_forked_child_is_no_rank(group: str) -> None:
    """Forks in a run of the group that an expression makes, of one process."""
    program = f"""
import os
from gpuopt.distributed import *

def run(communicator):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    communicator.barrier()

group = {group}
for _ in range(2):  # the child's second time is a run of its own
    try:
        group.run(run)
    except RuntimeError as error:
        print(error, flush=True)
"""
    told = "rank 0 is the process that this child was forked from, and not the child"
    # Of the first child in both runs, and of the second one in the second.
    assert run_alone(program, is_quiet=False).splitlines() == [told] * 3


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, which is to end the ranks, and then whatever is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
