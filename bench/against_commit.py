"""Times gpuopt's steps on the CPU beside those of another commit.

    .venv/bin/python -m bench.against_commit COMMIT

Each commit runs in a process of its own. In each round both time a block of steps, one after the
other, so that other programs on the machine slow both down alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import ROOT, make_parser, write_results
from bench.workloads import offer_host_workloads
from gpuopt.bench.compare import find_median
from gpuopt.bench.machine import describe_commit, read_cpu_model
from gpuopt.bench.results import Times, make_figures
from gpuopt.bench.workloads import Workload, make_run

_BLOCK_MS = 50


def main() -> None:
    parser = make_parser("bench.against_commit", __doc__, 40, only="host_*_16m")
    parser.add_argument("commit", metavar="COMMIT", help="the other commit")
    options = parser.parse_args()
    runs = {}
    with (
        checkout(options.commit) as other,
        tempfile.TemporaryDirectory() as our_cache,
        tempfile.TemporaryDirectory() as their_cache,
        _start_worker(ROOT, our_cache) as ours,
        _start_worker(other, their_cache) as theirs,
    ):
        against = describe_commit(other)
        for name in [offer.name for offer in offer_host_workloads(options.only)]:
            if (reason := _ask(theirs, "make", name)["error"]) is not None:
                print(f"{name}: left out, as {against} cannot make it: {reason}", flush=True)
                continue
            workload = Workload(_ask(ours, "make", name)["description"], {})
            blocks = _take_blocks((ours, theirs), options.rounds)
            figures = [make_figures({"step": samples}, None, None) for samples in blocks]
            runs[name] = make_run(workload, dict(zip(("gpuopt", against), figures, strict=True)))
            print(f"{name}: {describe_ratio(*(each.usual for each in figures))}", flush=True)
    if not options.no_results:
        folder = f"{read_cpu_model()} {os.cpu_count()} cores against {against}"
        print(f"written: {write_results(runs, folder)}")


def describe_ratio(ours: Times, theirs: Times) -> str:
    """Returns both medians, and that of their rounds' ratios with its 95 % interval.

    Of the ratios, as what slows the machine down slows down both blocks of a round.
    """
    ratios = [a / b for a, b in zip(ours.samples_ms, theirs.samples_ms, strict=True)]
    low, high = find_median(ratios, 0.05)
    times = f"{ours.median_ms:.3f} / {theirs.median_ms:.3f} ms"
    return f"{times} = {median(ratios):.3f} ({low:.3f} to {high:.3f})"


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Checks a commit out into a temporary worktree, and returns its folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "against")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def _start_worker(checkout: Path, cache: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "bench" / "against_commit_worker.py"), str(checkout)],
        env={**os.environ, "GPUOPT_CACHE_DIR": cache},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _take_blocks(
    workers: Sequence[subprocess.Popen[str]], rounds: int
) -> tuple[list[float], list[float]]:
    """Returns the mean times of steps of each worker's blocks, in milliseconds."""
    blocks: list[list[float]] = [[] for _ in workers]
    for number in range(rounds):
        # They take turns at going first.
        for which in (0, 1) if number % 2 else (1, 0):
            blocks[which].append(_ask(workers[which], "block", _BLOCK_MS))
    return blocks[0], blocks[1]


def _ask(worker: subprocess.Popen[str], command: str, argument: object) -> Any:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(json.dumps([command, argument]), file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError("a commit's process has ended; its error is above")
    return json.loads(answer)


if __name__ == "__main__":
    main()
