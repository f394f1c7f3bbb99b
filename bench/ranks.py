"""Times what several processes cost, over each MPI that the tests have set up.

    .venv/bin/python -m bench.ranks

`make test-ranks` makes the environments of both MPIs. Contenders take turns in one job, whose ranks
begin each step together; the time of a step is that of its slowest rank. The tables of
docs/scale.md are written anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench import pages
from bench.harness import ROOT, make_parser, report, write_results
from bench.targets import Target
from gpuopt.bench.workloads import Workload

MPIS = ("openmpi", "mpich")
# By the number of ranks: what they do.
_EVERYWHERE = ("exchange", "all_reduce_1mb", "all_reduce_16mb")
JOBS = {
    2: (*_EVERYWHERE, "step"),
    3: (*_EVERYWHERE, "rows"),
    4: _EVERYWHERE,
}
_HAND = "pack, Allreduce, unpack"
TARGETS = (
    Target("ranks_step_of_2", "extra_ms", "one process", at_most=1.0),
    Target("ranks_all_reduce_1mb_of_2", "ratio", _HAND, at_most=1.25),
    Target("ranks_all_reduce_16mb_of_2", "ratio", _HAND, at_most=1.25),
    Target("ranks_rows_of_3", "median_ms", at_most=10.0),
)
_LONGEST_JOB_S = 300
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PYTHONPATH": str(ROOT),
    # One thread for each rank, as where each has a core.
    "GPUOPT_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def main() -> None:
    parser = make_parser("bench.ranks", __doc__, rounds=100)
    parser.add_argument("--mpi", choices=MPIS, action="append", help="only this MPI")
    options = parser.parse_args()
    runs = {}
    for mpi in options.mpi or MPIS:
        for num_ranks, names in JOBS.items():
            for found in _run(mpi, num_ranks, options.rounds, names):
                name, what = found["name"], f"{found['description']}, over {mpi}"
                targets = [each for each in TARGETS if each.workload == name]
                over = f"{name}_over_{mpi}"
                runs[over] = report(over, Workload(what, {}), found["samples"], targets)
    if not options.no_results:
        path = write_results(runs)
        print(f"written: {path.relative_to(ROOT)}")
        if not options.mpi:
            pages.write("scale", [path])


def _run(mpi: str, num_ranks: int, rounds: int, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    folder = ROOT / f".venv-{mpi}" / "bin"
    if not folder.exists():
        sys.exit(f"{folder.parent} is not there: run make test-ranks first")
    environment = {**os.environ, **_ENVIRONMENT}
    if num_ranks > len(os.sched_getaffinity(0)):
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    # Launchers listen on every network that they find.
    command = [sys.executable, str(ROOT / "tests" / "support" / "loopback_only.py")]
    command += [str(folder / "mpiexec"), "-n", str(num_ranks), str(folder / "python")]
    finished = subprocess.run(
        [*command, "-m", "bench.ranks_worker", str(rounds), *names],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LONGEST_JOB_S,
    )
    return (json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{"))


if __name__ == "__main__":
    main()
