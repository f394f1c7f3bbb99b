"""Savers, threads and processes that save at one time leave each other's work alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from checkpoint_values import names, value, variable
from other_thread import in_threads

from gpuopt import Saver
from gpuopt.locks import importing


class Paused:
    """Lets the first save that writes its bytes wait in the middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        sync, self._first = os.fsync, threading.Lock()

        def pausing(descriptor: int) -> None:
            if self._first.acquire(blocking=False):
                self.is_there.set()
                assert self.may_go_on.wait(30)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", pausing)


def test_a_save_in_progress_is_left_alone_by_others_of_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = Paused(monkeypatch)
    one = Saver([variable(1.0)]).save_async(tmp_path / "m", 1)
    assert paused.is_there.wait(30)
    Saver([variable(2.0)]).save(tmp_path / "m", 2)  # its first: what is abandoned goes
    program = f"""
import numpy as np, gpuopt
w = gpuopt.Variable(np.full(3, 3.0, np.float32), name="w")
gpuopt.Saver([w]).save({str(tmp_path / "m")!r}, 3)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    paused.may_go_on.set()
    assert value(one.result()) == 1.0
    assert names(tmp_path) == [f"m-{step}.safetensors" for step in (1, 2, 3)]


def test_of_saves_to_one_file_the_last_to_end_counts_and_none_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = Paused(monkeypatch)
    future = Saver([variable(1.0)]).save_async(tmp_path / "m")
    assert paused.is_there.wait(30)
    path = Saver([variable(2.0)]).save(tmp_path / "m")
    assert value(path, "w_1") == 2.0
    paused.may_go_on.set()
    assert future.result() == path
    assert value(path) == 1.0
    assert names(tmp_path) == ["m.safetensors"]


def test_threads_may_share_a_saver(tmp_path: Path) -> None:
    w = variable(1.0)
    saver = Saver([w], max_to_keep=3)

    def work(number: int) -> None:
        with suppress(FileNotFoundError):  # other threads have saved three since
            for step in range(10):
                path = saver.save(tmp_path / "m", 100 * number + step)
                saver.save_async(tmp_path / "a", 100 * number + step)
                saver.restore(path) if Path(path).exists() else None

    in_threads(*(partial(work, number) for number in range(4)))
    saver.save(tmp_path / "m", 999)
    assert names(tmp_path) == sorted(Path(path).name for path in saver.last_checkpoints)
    assert len(names(tmp_path)) == 3


def test_processes_of_one_prefix_lose_no_save(tmp_path: Path) -> None:
    program = f"""
import sys
import numpy as np, gpuopt
rank = int(sys.argv[1])
w = gpuopt.Variable(np.zeros(10_000, np.float32), name="w")
for run in range(8):
    saver = gpuopt.Saver([w], max_to_keep=2)  # its first save removes what is abandoned
    for step in range(1000 * rank + 100 * run, 1000 * rank + 100 * run + 5):
        w.assign(np.full(10_000, step, np.float32))
        future = saver.save_async({str(tmp_path / "m")!r}, step)
        saver.restore(future.result())
        assert (w.numpy() == step).all()
"""
    commands = [[sys.executable, "-c", program, str(rank)] for rank in range(3)]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(timeout=120) == 0
    kept = [
        1000 * rank + 100 * run + 3 + k for rank in range(3) for run in range(8) for k in (0, 1)
    ]
    assert names(tmp_path) == sorted(f"m-{step}.safetensors" for step in kept)


def test_a_save_in_the_background_waits_for_no_import(tmp_path: Path) -> None:
    """A signal handler may have come in the middle of one, and wait for the save."""
    saver = Saver([variable()])
    saver.restore(saver.save(tmp_path / "first"))
    with importing:
        path = saver.save_async(tmp_path / "second").result(20)
    saver.restore(path)
