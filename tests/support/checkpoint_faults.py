"""Programs that test_checkpoint_faults.py runs in processes of their own.

    python checkpoint_faults.py <program> <folder> [arguments]

Each prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gpuopt
from gpuopt.checkpoint.checkpoint_folder import checkpoint_files

SIZE = 30_000


class Training:
    """Steps that put their own number into every element, slots too."""

    def __init__(self, folder: Path, max_to_keep: int = 2, numbered: bool = True) -> None:
        self.folder = folder
        self.numbered = numbered
        self.w = gpuopt.Variable(np.zeros(SIZE, np.float32), name="w")
        self.step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
        self.optimizer = gpuopt.MomentumOptimizer(-1.0, 0.0)
        self.saver = gpuopt.Saver(max_to_keep=max_to_keep)

    def train(self) -> int:
        value = int(self.step) + 1
        gradient = np.full(SIZE, value, np.float32) - self.w.numpy()
        self.optimizer.apply_gradients([(gradient, self.w)], global_step=self.step)
        return value

    def save(self) -> str:
        step = self.step if self.numbered else None
        return self.saver.save(self.folder / "model", global_step=step)

    def newest(self) -> int:
        """Restores the newest checkpoint and returns its step; fails if it is not whole."""
        found = set(checkpoint_files(self.folder))
        assert found == set(self.folder.glob("*.safetensors")), "a file is there in part"
        path = gpuopt.latest_checkpoint(self.folder)
        assert path is not None, "no checkpoint is left"
        self.saver.restore(path)
        value = int(self.step)
        assert not self.numbered or path.endswith(f"-{value}.safetensors"), path
        assert (self.w.numpy() == value).all(), "a mixture"
        assert self.optimizer.get_slot(self.w, "momentum") is not None
        return value


def failing_calls(folder: Path, numbered: str) -> Any:
    """Lets each system call of a save fail in turn, with several errors; training goes on."""
    libc = ctypes.CDLL(None)
    errors, orders = 0, set()
    run = Training(folder, numbered=numbered == "True")
    run.train()
    run.save()
    for number in (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT):
        call = 0
        while True:
            call += 1
            old, new = int(run.step), run.train()
            calls = ctypes.create_string_buffer(4096)
            raised = None
            libc.arm(call, number)
            try:
                run.save()
            except OSError as error:
                raised = error
            fired = libc.disarm(calls)
            if not fired:
                orders.add(calls.value.decode().strip())
            weights = run.w.numpy()
            assert (weights == new).all(), "the training process lost its state"
            found = run.newest()
            assert found in (old, new), (found, old, new)
            if raised is None:
                assert found == new
            elif not fired:
                raise raised
            else:
                errors += 1
                assert "checkpoint" in str(raised) or str(folder) in str(raised), raised
            # And it can go on.
            run.train()
            run.save()
            assert run.newest() == found + 1
            left = [p.name for p in folder.iterdir() if p.name.endswith(".partial")]
            assert left == [] or fired, left
            if not fired:
                break
    return {"errors": errors, "orders": sorted(orders)}


def killed_at_each_call(folder: Path, numbered: str) -> Any:
    """Kills the process at each system call of a save in turn."""
    libc = ctypes.CDLL(None)
    run = Training(folder, numbered=numbered == "True")
    run.train()
    run.save()
    old_or_new = {"old": 0, "new": 0}
    call = 0
    while True:
        call += 1
        old, new = int(run.step), run.train()

        def save(call: int = call) -> None:
            libc.arm(call, 0)
            run.save()

        status = in_child(save)
        found = run.newest()
        assert found in (old, new), (found, old, new)
        old_or_new["old" if found == old else "new"] += 1
        if not os.WIFSIGNALED(status):
            assert found == new
            break
    # What the killed ones left aside goes with the first save of the next run.
    Training(folder).save()
    left = [path.name for path in folder.iterdir() if path.suffix != ".safetensors"]
    assert left == [], left
    return old_or_new


def killed_at_random_moments(folder: Path, times: str) -> Any:
    """Kills a loop of saves, by turns synchronous and in the background, at random moments."""
    choose = random.Random(6)
    run = Training(folder)
    run.train()
    began = time.monotonic()
    run.save()
    # Some are killed within their first save, and most a few saves later, on busy machines too.
    longest_s = max(0.04, 6 * (time.monotonic() - began))
    seen = set()
    for number in range(int(times)):

        def loop(asynchronous: bool = number % 2 == 1) -> None:
            run.saver = gpuopt.Saver(max_to_keep=2)
            run.saver.recover_last_checkpoints(map(str, checkpoint_files(folder)))
            while True:
                run.train()
                if asynchronous:
                    run.saver.save_async(folder / "model", global_step=run.step)
                else:
                    run.save()

        before = int(run.step)
        in_child(loop, choose.uniform(0.0, longest_s))
        found = run.newest()
        assert found >= before, (found, before)
        seen.add(found)
    # What the killed ones left aside goes with the first save of the next run.
    run.saver = gpuopt.Saver()
    run.save()
    left = [path.name for path in folder.iterdir() if path.suffix != ".safetensors"]
    assert left == [], left
    return {"times": int(times), "distinct": len(seen)}


def full_disk(folder: Path) -> Any:
    """Fills a small file system, then makes it read-only; the caller has mounted it."""
    run = Training(folder, max_to_keep=0)
    saved = []
    message = None
    for _ in range(50):
        run.train()
        try:
            run.save()
        except OSError as error:
            message = str(error)
            break
        saved.append(int(run.step))
    assert message is not None, "the disk never filled up"
    assert run.newest() == saved[-1]
    assert not list(folder.glob(".*.partial"))
    Path(gpuopt.latest_checkpoint(folder)).unlink()
    run.train()
    run.save()
    assert run.newest() == saved[-1] + 1
    assert os.system(f"mount -o remount,ro {folder}") == 0
    run.train()
    try:
        run.save()
    except OSError as error:
        read_only = str(error)
    else:
        raise AssertionError("a read-only folder was written to")
    assert run.newest() == saved[-1] + 1
    return {"saved": len(saved), "full": message, "read_only": read_only}


def in_child(body: Callable[[], None], kill_after_s: float | None = None) -> int:
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


if __name__ == "__main__":
    program, folder, *arguments = sys.argv[1:]
    print(json.dumps(globals()[program](Path(folder), *arguments)))
