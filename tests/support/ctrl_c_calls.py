"""Ctrl-C at random moments of steps, saves, restores and copies: real signals, of a timer.

Each call is made again until enough have been interrupted. After each interrupt, all arrays and
numbers must be those of one and the same step, or everything that reads them must refuse.

Run as a program with a folder, a device and a number of interrupts of each call.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from interrupt_at import AtRandomMoments

import gpuopt
from gpuopt.interrupts import SMALL_WRITE

LARGE, SMALL = SMALL_WRITE + 20_000, 24
# Of the reference: training goes back to its first steps when it comes to the last.
MOST_STEPS = 60


class Training:
    """A large and a small variable, whose gradients are ones: so all elements are the same."""

    def __init__(self, device: str, size: int) -> None:
        self.w = gpuopt.Variable(np.zeros(size, np.float32), name=f"w{size}", device=device)
        self.b = gpuopt.Variable(np.zeros(SMALL, np.float32), name=f"b{size}", device=device)
        self.step = gpuopt.Variable(0, name=f"step{size}", dtype=np.int64)
        self.optimizer = gpuopt.AdamOptimizer(0.1, name=f"Adam{size}")
        self.pairs = [
            (gpuopt.Variable(np.ones(each.shape, np.float32), device=device).value(), each)
            for each in (self.w, self.b)
        ]
        self.named = {"w": self.w, "b": self.b}
        self.all_named = {**self.named, "step": self.step}
        self.expected = [self.look()]
        for number in range(MOST_STEPS):
            self.one()
            self.expected.append(self.look())
            if number == 2:
                self.state = self.optimizer.state_dict(self.named)
                self.values = [each.numpy() for each in self.named.values()]
        self.go_back()

    def one(self) -> None:
        self.optimizer.apply_gradients(self.pairs, self.step)

    def go_back(self) -> None:
        """Goes back to the third step, also from one that was not finished."""
        self.load()
        for variable, value in zip(self.named.values(), self.values, strict=True):
            variable.assign(value)
        self.step.assign(3)

    def load(self) -> None:
        self.optimizer.load_state_dict(self.state, self.named)

    def look(self) -> dict[str, set[float]]:
        """Returns the elements of all arrays and numbers."""
        found = {name: each.numpy() for name, each in self.all_named.items()}
        for name, variable in self.named.items():
            for slot_name in ("m", "v"):
                slot = self.optimizer.get_slot(variable, slot_name)
                found[f"{name}/{slot_name}"] = np.zeros(1) if slot is None else slot.numpy()
        for name in ("beta1_power", "beta2_power"):
            number = self.optimizer.state.other(name)
            found[name] = np.ones(1) if number is None else number.numpy()
        return {name: set(np.unique(each).tolist()) for name, each in found.items()}

    def is_whole(self) -> bool:
        return self.look() == self.expected[int(self.step)]


class CtrlC(AtRandomMoments):
    """Sends SIGINT to this process."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, KeyboardInterrupt)
        # What a callback of a weak reference raises, Python loses.
        self._is_lost = False
        sys.unraisablehook = self._note_lost
        # A shell's background has none.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(self) -> None:
        signal.raise_signal(signal.SIGINT)

    def _note_lost(self, unraisable: Any) -> None:
        self._is_lost = True

    def during(self, name: str, call: Callable[[], Any]) -> bool:
        self._is_lost = False
        was_interrupted = super().during(name, call)
        assert was_interrupted or not self.came or self._is_lost, "the interrupt was lost"
        return was_interrupted


def run(folder: Path, device: str, number: int, seed: int) -> dict[str, Counter[str]]:
    """Interrupts each call so many times; returns what came after it.

    Raises:
        AssertionError: a step was torn, and nobody noticed.
    """
    large, small = Training(device, LARGE), Training(device, SMALL)
    savers = {
        training: gpuopt.Saver(training.all_named, optimizers=[training.optimizer], max_to_keep=2)
        for training in (large, small)
    }
    restored = savers[large].save(folder / "restored", 3)
    saved = folder / "saved"
    saved.mkdir()
    saver = gpuopt.Saver(large.all_named, optimizers=[large.optimizer], max_to_keep=2)
    calls: dict[str, tuple[Training, Callable[[], Any]]] = {
        "large step": (large, large.one),
        "small step": (small, small.one),
        "save": (large, lambda: saver.save(saved / "m", large.step)),
        "restore": (large, lambda: savers[large].restore(restored)),
        "load_state_dict": (large, large.load),
        "pickle": (large, lambda: pickle.dumps([large.optimizer, large.w, large.step])),
        "deepcopy": (large, lambda: copy.deepcopy([large.optimizer, large.b])),
    }
    ctrl_c, outcomes = CtrlC(seed), {name: Counter[str]() for name in calls}
    for name, (training, call) in calls.items():
        deadline = time.monotonic() + 600
        while outcomes[name].total() < number and time.monotonic() < deadline:
            if int(training.step) > MOST_STEPS - 4:
                training.go_back()
            training.one()
            before = int(training.step)
            if not ctrl_c.during(name, call):
                training.go_back()
                continue
            outcomes[name][_after(name, training, call, before)] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        left = [each for each in os.listdir(saved) if not each.endswith(".safetensors")]
        assert not left, left
    return outcomes


def _after(name: str, training: Training, call: Callable[[], Any], before: int) -> str:
    """Says what an interrupted call has left; whatever it is, training goes on after it."""
    try:
        training.optimizer.state_dict(training.named)
    except RuntimeError as error:
        if "was not finished" not in str(error) or "step" not in name:
            raise
        training.optimizer.accept_unfinished_step()
        training.go_back()
        assert training.is_whole()
        return "refused"
    if name == "load_state_dict":  # slots and powers alone
        now, loaded = training.look(), training.expected[3]
        kept = {key for key in now if now[key] == training.expected[before][key]}
        changed = {key for key in now if "/" in key or "power" in key}
        assert kept == set(now) or (kept | changed == set(now) and not kept & changed), kept
        assert kept == set(now) or all(now[key] == loaded[key] for key in changed), now
        training.go_back()
        training.one()
        assert training.is_whole()
        return "as before" if kept == set(now) else "made"
    assert training.is_whole(), (name, before, training.look())
    after = int(training.step)
    if "step" not in name:
        call()
        assert training.is_whole()
    training.one()  # the training loop is run again
    assert training.is_whole()
    return "made" if after != before else "as before"


def run_alone(folder: Path, device: str, number: int) -> dict[str, Counter[str]]:
    """Does what `run` does, in a process of its own, whose handlers it changes."""
    ran = subprocess.run(
        [sys.executable, __file__, str(folder), device, str(number)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {name: Counter(found) for name, found in json.loads(ran.stdout.splitlines()[-1]).items()}


if __name__ == "__main__":
    place, where, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    seed = random.randrange(2**32)
    print("seed", seed, flush=True)
    print(json.dumps(run(place, where, count, seed)))
