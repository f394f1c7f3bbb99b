"""Signal handlers that step, save and restore at random moments of the same calls.

A handler may come in the middle of another, raise at its end, or fork. What it calls works, or
raises RuntimeError at once; afterwards everything must still work.

Run as a program with a folder, a number of signals, and a seed if need be.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from forked_children import check_child, forked
from interrupted_calls import CHECKED_EVERY, DEADLINE_S, Interrupt, Trial

import gpuopt

DEEPEST = 3
REFUSALS = (
    *("in the middle of", "as by a signal handler", "a signal handler has come", "in a loss"),
    "came or went while a step",
)


class Handlers:
    """Has the main thread make random calls in the middle of a call."""

    def __init__(self, trial: Trial, calls: dict[str, Callable[[], Any]], seed: int) -> None:
        self._random = random.Random(seed)
        self._trial = trial
        self._calls = calls
        self._depth = 0
        self._is_wanted = False
        self.handled = 0
        self.refusals: dict[str, int] = {}
        self.errors: list[BaseException] = []
        signal.signal(signal.SIGALRM, self._handle)

    def call(self, name: str) -> None:
        """Makes a call, in the middle of which signals come."""
        self._is_wanted = True
        try:
            self._make(name)
        except Interrupt:
            pass
        finally:
            self._is_wanted = False
            self._depth = 0

    def _make(self, name: str) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, 4e-3))
        began = time.monotonic()
        try:
            self._calls[name]()
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSALS):
                self.errors.append(error)
            self.refusals[str(error)[:60]] = self.refusals.get(str(error)[:60], 0) + 1
        except Interrupt:
            raise
        except BaseException as error:
            self.errors.append(error)
        assert time.monotonic() - began < DEADLINE_S

    def _handle(self, *_: Any) -> None:
        if not self._is_wanted or self._depth >= DEEPEST:
            return
        self.handled += 1
        self._depth += 1
        choice = self._random.random()
        if choice < 0.1:
            raise Interrupt
        self._make(self._random.choice(sorted(self._calls)))
        self._depth -= 1
        if choice < 0.2:
            raise Interrupt


def run(folder: Path, number: int, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda unraisable: None
    trial = Trial(folder, seed)
    average = gpuopt.ExponentialMovingAverage(0.5)
    # Without the raw arrays of `step_new`, which have no names to be saved by.
    everything = gpuopt.Saver(max_to_keep=2, optimizers=[trial.optimizer, trial.adam])
    other = folder / "other"
    other.mkdir()

    def fork() -> None:
        check_child(forked(lambda: None))

    def check_in_child() -> None:
        trial.folder = other
        trial.check()

    def restore() -> None:
        with suppress(FileNotFoundError):  # a handler's saves have removed it meanwhile
            trial.calls["restore"]()

    calls = {
        **trial.calls,
        "restore": restore,
        "average": lambda: average.apply(trial.variables),
        "list": gpuopt.global_variables,
        "everything": lambda: everything.save(other / "all", trial.step),
        "fork": fork,
    }
    trial.check_everywhere()
    handlers = Handlers(trial, calls, seed)
    choices = random.Random(seed)
    stop = threading.Event()
    own = gpuopt.Variable(np.zeros(100), name="own")
    adam = gpuopt.AdamOptimizer(0.01)

    def in_another_thread() -> None:
        saver = gpuopt.Saver([own], max_to_keep=1)
        while not stop.wait(0.001):
            adam.apply_gradients([(np.ones(100), own)])
            saver.restore(saver.save(other / "own", 1))

    rounds = 0
    while handlers.handled < number:
        rounds += 1
        stop.clear()
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        for _ in range(CHECKED_EVERY):
            handlers.call(choices.choice(sorted(calls)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        stop.set()
        thread.join()
        for error in handlers.errors:
            traceback.print_exception(error)
        assert not handlers.errors, f"{len(handlers.errors)} errors in round {rounds}"
        trial.check_everywhere()
        everything.restore(everything.save(other / "all", trial.step))
        check_child(forked(check_in_child))
        trial.save()
        kept = {Path(path).name for path in trial.saver.last_checkpoints}
        found = {name for name in os.listdir(folder) if name != "other"}
        assert found == kept, (found, kept)
    gc.collect()
    print("handled", handlers.handled, handlers.refusals)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[2:]]
    run(Path(sys.argv[1]), *(given if len(given) == 2 else (*given, random.randrange(2**32))))
