"""Exceptions from a signal handler at random moments, after which everything must still work.

Run as a program with a folder, a number of interrupts of each call, and a seed if need be.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from interrupt_at import AtRandomMoments

import gpuopt
from gpuopt.step import request
from gpuopt.variables import recording

# Large enough for threads and for chunks.
LARGE = 70_000
ROWS, WIDTH = 50, 8
RATE, MOMENTUM = 0.5, 0.5
# Nothing here takes so long.
DEADLINE_S = 30
CHECKED_EVERY = 20


class Trial:
    """Variables, what trains and saves them, and what numpy says they must be."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.folder = folder
        self.large = gpuopt.Variable(np.zeros(LARGE, np.float32), name="large")
        self.small = gpuopt.Variable(np.zeros(20, np.float32), name="small")
        self.table = gpuopt.Variable(np.zeros((ROWS, WIDTH), np.float32), name="table")
        self.step = gpuopt.Variable(0, dtype=np.int64, name="step")
        self.variables = [self.large, self.small, self.table]
        self.optimizer = gpuopt.MomentumOptimizer(RATE, MOMENTUM, use_locking=True)
        self.adam = gpuopt.AdamOptimizer(0.01)
        self.others = gpuopt.MomentumOptimizer(RATE, MOMENTUM)
        self.wrapped = gpuopt.MovingAverageOptimizer(
            gpuopt.VariableClippingOptimizer(
                gpuopt.MultitaskOptimizerWrapper(self.others), {self.small: [0]}, max_norm=1e3
            ),
            average_decay=0.5,
        )
        self.saver = gpuopt.Saver(
            [*self.variables, self.step], optimizers=[self.optimizer, self.adam], max_to_keep=2
        )
        self.step_dense()
        self.step_sparse()
        self.step_adam()
        self.save()
        self.state = self.optimizer.state_dict()
        self.calls: dict[str, Callable[[], Any]] = {
            "dense": self.step_dense,
            "dense, large": self.step_large,
            "sparse": self.step_sparse,
            "mixed": self.step_mixed,
            "adam": self.step_adam,
            "new": self.step_new,
            "streaming": self.step_streaming,
            "wrapped": self.step_wrapped,
            "rows": self.change_rows,
            "save": self.save,
            "save_async": self.save_async,
            "restore": lambda: self.saver.restore(self.saver.last_checkpoints[-1]),
            "state_dict": self.optimizer.state_dict,
            "load_state_dict": lambda: self.optimizer.load_state_dict(self.state),
        }

    def pairs(self) -> tuple[Any, Any, Any]:
        """Returns gradients of halves, which float32 adds up exactly."""
        large, small, values = (
            self.numbers.integers(-4, 4, shape).astype(np.float32) / 2
            for shape in (LARGE, 20, (3, WIDTH))
        )
        rows = gpuopt.IndexedSlices(values, self.numbers.integers(0, ROWS, 3), (ROWS, WIDTH))
        return large, small, rows

    def step_dense(self) -> None:
        large, small, _ = self.pairs()
        self.optimizer.apply_gradients([(large, self.large), (small, self.small)], self.step)

    def step_large(self) -> None:
        self.optimizer.apply_gradients([(self.pairs()[0], self.large)], self.step)

    def step_sparse(self) -> None:
        self.optimizer.apply_gradients([(self.pairs()[2], self.table)], self.step)

    def step_mixed(self) -> None:
        large, small, rows = self.pairs()
        self.optimizer.apply_gradients(
            [(rows, self.table), (large, self.large), (small.tolist(), self.small)], self.step
        )

    def step_adam(self) -> None:
        large, _, rows = self.pairs()
        self.adam.apply_gradients([(rows, self.table), (large, self.large)], self.step)

    def step_new(self) -> None:
        """Makes variables and slots, and groups that are not known yet."""
        new = gpuopt.Variable(np.zeros(5), name="new")
        self.others.apply_gradients([(np.ones(5), new)])
        raw = np.zeros(6)
        self.others.apply_gradients([(np.ones(6), raw)])

    def step_streaming(self) -> None:
        def loss() -> Any:
            return np.sum(self.small * 0.5) + np.sum(self.large * 0.5 + self.large * 0.5)

        self.optimizer.minimize(loss, self.step, [self.small, self.large], gate_gradients=0)

    def step_wrapped(self) -> None:
        large, small, _ = self.pairs()
        self.wrapped.apply_gradients([(large * 0, self.large), (small, self.small)], self.step)

    def change_rows(self) -> None:
        rows = gpuopt.rows(self.table)
        rows.keep(self.numbers.permutation(ROWS))
        rows.reset([1, 2], np.ones((2, WIDTH), np.float32))

    def save(self) -> str:
        return self.saver.save(self.folder / "m", self.step)

    def save_async(self) -> str:
        return self.saver.save_async(self.folder / "m", self.step).result()

    def settle(self) -> None:
        """Counts steps that were not finished."""
        for optimizer in (self.optimizer, self.adam, self.wrapped):
            optimizer.accept_unfinished_step()

    def check(self) -> None:
        """Gives everything new values, does everything once, and compares with numpy's values."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape))
        slots = {v.name: np.zeros(v.shape, np.float32) for v in self.variables}
        self.optimizer.load_state_dict(
            {**self.optimizer.state_dict(), "slots": {"momentum": slots}}
        )
        expected = {v.name: np.zeros(v.shape, np.float32) for v in self.variables}
        momenta = {v.name: np.zeros(v.shape, np.float32) for v in self.variables}

        def expect(name: str, gradient: Any) -> None:
            momenta[name] = np.float32(MOMENTUM) * momenta[name] + gradient
            expected[name] = expected[name] - np.float32(RATE) * momenta[name]

        def expect_rows(slices: Any) -> None:
            sums = np.zeros((ROWS, WIDTH), np.float32)
            np.add.at(sums, slices.indices, slices.values)
            touched = np.unique(slices.indices)
            momenta["table"][touched] *= np.float32(MOMENTUM)
            momenta["table"][touched] += sums[touched]
            expected["table"][touched] -= np.float32(RATE) * momenta["table"][touched]

        large, small, rows = self.pairs()
        self.optimizer.apply_gradients([(large, self.large), (small, self.small)], self.step)
        expect("large", large)
        expect("small", small)
        self.optimizer.apply_gradients([(rows, self.table)])
        expect_rows(rows)
        large, small, rows = self.pairs()
        self.optimizer.apply_gradients([(rows, self.table), (large, self.large)])
        expect("large", large)
        expect_rows(rows)
        self.step_streaming()
        expect("small", np.full(20, 0.5, np.float32))
        expect("large", np.ones(LARGE, np.float32))
        path = self.saver.save(self.folder / "m", self.step)
        self.compare(expected, momenta)
        for variable in self.variables:
            variable.assign(np.ones(variable.shape))
        self.saver.restore(path)
        self.compare(expected, momenta)
        self.saver.restore(self.save_async())
        self.compare(expected, momenta)
        self.state = self.optimizer.state_dict()
        self.step_adam()
        self.wrapped.averages.track([self.small])
        average = self.wrapped.averages.average(self.small)
        before = average.numpy()
        self.step_wrapped()
        moved = before - (before - self.small.numpy()) * np.float32(0.5)
        np.testing.assert_array_equal(average.numpy(), moved)

    def compare(self, expected: dict[str, Any], momenta: dict[str, Any]) -> None:
        for variable in self.variables:
            name = variable.name
            np.testing.assert_array_equal(variable.numpy(), expected[name], name)
            slot = self.optimizer.get_slot(variable, "momentum")
            assert slot is not None
            np.testing.assert_array_equal(slot.numpy(), momenta[name], name)

    def check_everywhere(self) -> None:
        """Checks here and in a second thread, and that nothing is left behind."""
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.check()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        self.check()
        assert recording.recorder() is None
        assert request.this_thread.passing is None
        faulthandler.cancel_dump_traceback_later()

    def check_folder(self) -> None:
        """Saves, and checks that there is nothing but the checkpoints to be kept."""
        self.save()
        kept = sorted(Path(path).name for path in self.saver.last_checkpoints)
        assert sorted(os.listdir(self.folder)) == kept, sorted(os.listdir(self.folder))
        assert len(kept) <= 2


def run(folder: Path, number: int, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    logging.disable(logging.CRITICAL)
    # What a callback of a weak reference raises is not raised anywhere else.
    sys.unraisablehook = lambda unraisable: None
    trial = Trial(folder, seed)
    trial.check_everywhere()
    how_numpy_warns, threads = np.geterr(), num_threads()
    interrupts = AtRandomMoments(seed)
    choices = random.Random(seed)
    counts = dict.fromkeys(trial.calls, 0)
    while left := [name for name, count in counts.items() if count < number]:
        name = choices.choice(left)
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        counts[name] += interrupts.during(name, trial.calls[name])
        trial.settle()
        faulthandler.cancel_dump_traceback_later()
        if sum(counts.values()) % CHECKED_EVERY == 0:
            trial.check_everywhere()
            assert np.geterr() == how_numpy_warns
            interrupts.last = None
            trial.check_folder()
    gc.collect()
    trial.check_everywhere()
    assert num_threads() <= threads + 3, (num_threads(), threads)
    print("interrupts", counts)


def num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.exists() else threading.active_count()


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[2:]]
    run(Path(sys.argv[1]), *(given if len(given) == 2 else (*given, random.randrange(2**32))))
