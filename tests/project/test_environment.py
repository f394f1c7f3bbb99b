"""Environment variables are read once, and a malformed one is found before anything is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpuopt
from gpuopt import environment
from gpuopt.backends.cpu.cores import cores, num_usable_cores
from gpuopt.backends.cpu.threads import num_threads

PACKAGE = Path(gpuopt.__file__).parent
MALFORMED = {
    "GPUOPT_THREADS": ["auto", "1e3", "0", "-1", "2.0", "\u0663"],
    "GPUOPT_COMPILED": ["yes", "2", "true"],
    "GPUOPT_CHECK": ["on", " 1"],
    "CXX": ["g++ '", '"'],
}
MAKERS: list[Callable[[], Any]] = [
    lambda: gpuopt.MomentumOptimizer(0.125, 0.5),
    lambda: gpuopt.ExponentialMovingAverage(0.5),
]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_variable_is_found_when_an_optimizer_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in MALFORMED[name]:
        monkeypatch.setenv(name, text)
        for make in MAKERS:
            with pytest.raises(ValueError, match=re.escape(f"{name}={text!r} is n")):
                make()


def test_a_number_of_more_digits_than_python_converts_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUOPT_THREADS", "9" * 5000)
    with pytest.raises(ValueError, match="GPUOPT_THREADS='99"):
        gpuopt.AdamOptimizer()


def test_the_command_line_refuses_a_malformed_variable_in_one_line() -> None:
    command = [sys.executable, "-m", "gpuopt", "demo", "--steps", "1"]
    ended = subprocess.run(
        command, env={**os.environ, "GPUOPT_THREADS": "1e3"}, capture_output=True, text=True
    )
    words = "gpuopt: GPUOPT_THREADS='1e3' is not a whole number of at least 1\n"
    assert (ended.returncode, ended.stderr) == (2, words)


SCRIPT = """
import os, sys
import numpy as np, gpuopt
small = gpuopt.Variable(np.ones(8, np.float32), name="small")
table = gpuopt.Variable(np.ones((20000, 16), np.float32), name="table")
optimizer = gpuopt.MomentumOptimizer(0.125, 0.5)
os.environ[sys.argv[1]] = sys.argv[2]
rows = gpuopt.IndexedSlices(np.ones((9000, 16), np.float32), np.arange(9000))
optimizer.apply_gradients([(np.ones(8, np.float32), small), (rows, table)])
print(small.numpy()[0], table.numpy()[0, 0])
gpuopt.environment.forget()
try:
    gpuopt.MomentumOptimizer(0.125, 0.5)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["GPUOPT_THREADS", "CXX"])
def test_a_variable_that_changes_later_is_not_read_in_a_step(name: str) -> None:
    command = [sys.executable, "-c", SCRIPT, name, MALFORMED[name][0]]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    first, last = ended.stdout.splitlines()
    assert first == "0.875 0.875"
    assert last.startswith(f"{name}=")


def test_no_other_module_reads_gpuopts_variables() -> None:
    found = {
        (module.name, name)
        for module in PACKAGE.rglob("*.py")
        for name in re.findall(r"""environ(?:\.get\(|\[)\s*["'](\w+)""", module.read_text())
    }
    assert not [each for each in found if each[1] in environment.names()]


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "12:cpuset:/\n4:cpu,cpuacct:/docker/1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
)
def test_default_threads_follow_the_quota_of_a_container(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert num_usable_cores(tmp_path) == most


def test_default_threads_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUOPT_THREADS", raising=False)
    assert 1 <= num_threads() <= min(8, len(cores()))
