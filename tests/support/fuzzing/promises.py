"""Random programs of steps that GPUs may leave out or refuse, beside an oracle on the host.

The oracle makes the steps alone that are to be made, eagerly and without loss scaling. Errors that
GPUs find late drop the calls since; some calls fail in their middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import driver
import numpy as np
from gpu_streams import new_stream
from naive_loss_scale import HostRule

import gpuopt
from gpuopt import IndexedSlices, LossScaleOptimizer, ParameterGroup, Variable, backends
from gpuopt.variables.unfinished import unfinished_steps

OPERATIONS = 30
SHAPES = {"w0": (3, 4), "w1": (70,), "table": (6, 4)}
TOLERANCE = 2e-5
MANAGERS: dict[str, Callable[[], gpuopt.LossScaleManager]] = {
    "fixed": lambda: gpuopt.FixedLossScaleManager(1024.0),
    "exponential": lambda: gpuopt.ExponentialUpdateLossScaleManager(8, 2, 2, 3.0, 0.7),
    "dynamic": lambda: gpuopt.DynamicLossScale(4.0, 3, 2.5),
}


def decays(step: Variable) -> Any:
    return gpuopt.exponential_decay(0.1, step, 3, 0.8)


def grows(step: Variable) -> Any:
    return gpuopt.linear_warmup(decays(step), step, 8)


# Optimizers whose steps differ from each other by as much as their number tells.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda step, **more: gpuopt.AdamOptimizer(decays(step), 0.7, 0.8, **more),
    "groups": lambda step, **more: gpuopt.LazyAdamOptimizer(
        0.1, groups=[ParameterGroup("w1", learning_rate=decays(step), beta1=0.5)], **more
    ),
    "Momentum": lambda step, **more: gpuopt.MomentumOptimizer(decays(step), 0.7, **more),
    "clipped": lambda step, **more: gpuopt.AdamOptimizer(0.1, 0.6, 0.7, clip_norm=0.5, **more),
    "TorchNAdam": lambda step, **more: gpuopt.TorchNAdamOptimizer(0.1, 0.7, 0.8, **more),
    "TorchAdamW": lambda step, **more: gpuopt.TorchAdamWOptimizer(decays(step), 0.7, 0.8, **more),
    "RAdam": lambda step, **more: gpuopt.RAdamOptimizer(decays(step), 0.7, 0.8, **more),
    "counts of variables": lambda step, **more: gpuopt.LazyAdamOptimizer(
        decays(step), 0.7, 0.8, count="variable", **more
    ),
    "schedule-free": lambda step, **more: gpuopt.ScheduleFreeSGDOptimizer(grows(step), 0.7, **more),
}
# Where a call fails, and whether that is after the call there.
FAILURES = [
    ("gpuopt.backends.cuda.backend.CudaBackend.apply_dense", False),
    ("gpuopt.backends.cuda.backend.CudaBackend.apply_dense", True),
    ("gpuopt.backends.cuda.loss_scaling.CudaLossScalings.read", False),
    ("gpuopt.backends.cuda.loss_scaling.CudaLossScalings.new", True),
    ("gpuopt.step.rule_updates.RuleUpdates.count", True),
    ("gpuopt.step.rule_updates.RuleUpdates.decide_on_gpu", True),
    ("gpuopt.step.clips.StepClips.measure", True),
]


class Injected(Exception):
    pass


class Program:
    """One random program; `log` says what it has done."""

    def __init__(self, seed: int, num_gpus: int) -> None:
        self.rng = np.random.default_rng([seed])
        self.log: list[str] = []
        choose = self.choose
        self.streams = [new_stream() for _ in range(2)]
        self.policy = choose(["scale", "scale", "skip", "raise", "propagate"])
        kind, manager = choose(list(OPTIMIZERS)), choose(list(MANAGERS))
        self.log.append(f"{self.policy} {kind} {manager}")
        self.places = {name: f"gpu:{self.rng.integers(num_gpus)}" for name in SHAPES}
        start = {n: self.rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        # The names are free again at a program's end: groups go by them.
        self.ours = {n: Variable(v, name=n, device=self.places[n]) for n, v in start.items()}
        self.steps = [Variable(0, name=f"step{at}", trainable=False) for at in range(2)]
        options = {"on_nonfinite": "propagate" if self.policy == "scale" else self.policy}
        self.inside = self.optimizer = OPTIMIZERS[kind](self.steps[0], **options)
        self.rule: HostRule | None = None
        if self.policy == "scale":
            self.optimizer = LossScaleOptimizer(
                self.inside, MANAGERS[manager](), host_may_wait=True
            )
            self.rule = HostRule(manager)
        self.their_steps = [Variable(0, trainable=False) for _ in range(2)]
        self.other = OPTIMIZERS[kind](self.their_steps[0])
        self.theirs = {n: Variable(v, name=f"{n}/theirs") for n, v in start.items()}
        if self.other.groups:
            group = ParameterGroup(
                "w1/theirs", learning_rate=decays(self.their_steps[0]), beta1=0.5
            )
            self.other = gpuopt.LazyAdamOptimizer(0.1, groups=[group])
        self.beside = Variable(np.zeros(2, np.float32))
        self.num_skipped = 0
        # Errors that the host has not heard of.
        self.bad_rows = self.is_bad = False

    def choose(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def operate(self) -> None:
        draw = self.rng.random()
        operations: list[tuple[float, Callable[[], None]]] = [
            (0.62, self.make_step),
            (0.70, self.make_failing_step),
            (0.82, self.look),
            (0.90, self.set_hyperparameter),
            (0.94, self.assign),
            (0.97, self.step_beside),
            (1.0, driver.synchronize),
        ]
        operation = next(each for limit, each in operations if draw < limit)
        self.log.append(getattr(operation, "__name__", "synchronize"))
        operation()

    def gradients(self, bad: str) -> tuple[dict[str, Any], Any]:
        chosen = list(SHAPES)[: self.rng.integers(1, 4)]
        given = {n: self.rng.normal(size=SHAPES[n]).astype(np.float32) for n in chosen}
        rows = self.rng.integers(0, 6, 5)
        if "table" in given:
            given["table"] = given["table"][:5]
        if bad == "value":
            each = given[self.choose(chosen)]
            each[tuple(self.rng.integers(0, each.shape))] = self.choose([np.inf, -np.inf, np.nan])
        return given, rows

    def call(self, given: dict[str, Any], rows: Any, at: int | None) -> None:
        counter = None if at is None else self.steps[at]
        scale = np.float32(self.choose([1, 4, 256])) if self.rule else np.float32(1)
        with self.streams[self.rng.integers(2)]:
            put = {n: backends.to_device(g * scale, self.ours[n].device) for n, g in given.items()}
            pairs: list[Any] = [(put[n], self.ours[n]) for n in put]
            if "table" in put:
                there = backends.to_device(rows, self.ours["table"].device)
                pairs[-1] = (IndexedSlices(put["table"], there), self.ours["table"])
            more = {"loss_scale": scale} if self.rule else {}
            self.optimizer.apply_gradients(pairs, counter, **more)

    def follow(self, given: dict[str, Any], rows: Any, at: int | None) -> None:
        pairs: list[Any] = [(given[n], self.theirs[n]) for n in given]
        if "table" in given:
            pairs[-1] = (IndexedSlices(given["table"], rows), self.theirs["table"])
        self.other.apply_gradients(pairs, None if at is None else self.their_steps[at])
        if self.rule is not None:
            self.rule.step(True)

    def make_step(self) -> None:
        draw = self.rng.random()
        bad = "value" if draw < 0.35 else "rows" if draw < 0.4 else ""
        if bad == "value" and self.policy == "propagate":
            bad = ""
        given, rows = self.gradients(bad)
        if bad == "rows" and "table" not in given:
            bad = ""
        asked = np.where(np.arange(5) == 2, 6, rows) if bad == "rows" else rows
        at = self.choose([0, 0, 0, 0, 0, 0, 1, None])
        self.log.append(f"  {bad or 'good'} {','.join(given)} by {at}")
        if not self.hears_in(lambda: self.call(given, asked, at), bad):
            return
        if self.bad_rows or self.is_bad:
            pass  # it is dropped, with what is bad of it
        elif bad == "rows":
            self.bad_rows = True
        elif bad == "value" and self.policy == "raise":
            self.is_bad = True
        elif bad == "value":
            self.num_skipped += 1
            if self.rule is not None:
                self.rule.step(False)
        else:
            self.follow(given, rows, at)

    def hears_in(self, call: Callable[[], Any], bad: str = "") -> bool:
        """Makes a call; returns False if it was dropped, as it heard of an error.

        Where the host decides, that may be the call's own.
        """
        heard: Exception | None = None
        try:
            call()
        except (FloatingPointError, IndexError) as error:
            heard = error
        if isinstance(heard, FloatingPointError):
            assert self.is_bad or bad == "value", heard
            assert self.is_bad == ("found this after the call" in str(heard)), heard
            self.is_bad = False
        elif heard is not None:
            assert self.bad_rows or bad == "rows", heard
            assert "row 6" in str(heard), heard
            self.bad_rows = False
        return heard is None

    def make_failing_step(self) -> None:
        """Makes a call that an exception ends somewhere, and settles what it leaves."""
        self.settle()
        for _ in range(self.rng.integers(3)):  # promises before it, that stand
            self.make_step()
        if self.bad_rows or self.is_bad:
            return
        (place, is_after), num_calls = self.choose(FAILURES), int(self.rng.integers(1, 3))
        given, rows = self.gradients("")
        self.log.append(f"  in {place} {'after' if is_after else 'before'} {num_calls}")
        try:
            with failing(place, is_after, num_calls):
                self.call(given, rows, 0)
        except Injected:
            if not unfinished_steps():
                return  # as if never called
            self.optimizer.accept_unfinished_step()
            self.follow(given, rows, 0)
            self.take_arrays()
        else:
            self.follow(given, rows, 0)

    def take_arrays(self) -> None:
        """Has the arrays be the oracle's: it is not known what an unfinished step has written."""
        for ours, theirs in self.arrays():
            ours.assign(backends.to_device(theirs.numpy(), ours.device))

    def arrays(self) -> list[tuple[Variable, Variable]]:
        found = []
        for name, ours in self.ours.items():
            found.append((ours, self.theirs[name]))
            for slot in self.other.get_slot_names():
                theirs = self.other.get_slot(self.theirs[name], slot)
                mine = self.inside.get_slot(ours, slot)
                if theirs is not None and mine is not None:
                    found.append((mine, theirs))
        return found

    def settle(self) -> None:
        """Raises the late error, if there is one."""
        self.hears_in(self.optimizer.check)
        assert not self.bad_rows
        assert not self.is_bad

    def numbers(self, steps: Sequence[Variable], optimizer: Any) -> dict[str, Any]:
        every = optimizer.state.others()
        found = {name.removesuffix("/theirs"): each.numpy()[()] for name, each in every.items()}
        return found | {str(at): int(each) for at, each in enumerate(steps)}

    def look(self) -> None:
        if self.bad_rows:
            self.settle()  # before, refused calls count
        what = self.rng.integers(4)
        if what == 0:
            assert [*map(int, self.steps)] == [*map(int, self.their_steps)]
        elif what == 1 and self.rule is not None:
            assert np.float32(self.optimizer.loss_scale) == self.rule.scale
            assert self.optimizer.num_skipped == self.num_skipped
        elif what == 2:
            self.compare_numbers()
        else:
            self.settle()
            self.compare()

    def compare_numbers(self) -> None:
        if not self.other.state.others():
            return
        ours = self.numbers(self.steps, self.inside)
        assert ours == self.numbers(self.their_steps, self.other)

    def compare(self) -> None:
        for at, (got, expected) in enumerate(self.arrays()):
            np.testing.assert_allclose(
                got.numpy(), expected.numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=str(at)
            )
        self.compare_numbers()

    def set_hyperparameter(self) -> None:
        names = [each for each in ("beta1", "momentum", "learning_rate") if each in self.rates]
        name = self.choose(names)
        if name == "beta1" and not self.other.state.others():
            return  # a step that is left out has made the powers, of another beta
        value = np.float32(self.choose([0.05, 0.1, 0.2] if name == "learning_rate" else [0.5, 0.7]))
        self.log.append(f"  {name} {value}")
        self.optimizer.hyperparameters[name] = value
        self.other.hyperparameters[name] = value

    @property
    def rates(self) -> Any:
        return self.other.hyperparameters

    def assign(self) -> None:
        if self.bad_rows:
            self.settle()
        value = int(self.rng.integers(20))
        self.steps[0].assign(value)
        self.their_steps[0].assign(value)

    def step_beside(self) -> None:
        """Another optimizer counts by the same variable."""
        if self.bad_rows:
            self.settle()
        gradient = np.ones(2, np.float32)
        plain = gpuopt.GradientDescentOptimizer(0.1)
        plain.apply_gradients([(gradient, self.beside)], self.steps[0])
        self.their_steps[0].assign_add(1)


@contextmanager
def failing(place: str, is_after: bool, num_calls: int) -> Any:
    """Has one call of a method fail."""
    calls = itertools.count(1)
    owner, _, name = place.rpartition(".")
    module, _, cls = owner.rpartition(".")
    real = getattr(getattr(__import__(module, fromlist=[cls]), cls), name)

    def fail(*given: Any, **named: Any) -> Any:
        if next(calls) != num_calls:
            return real(*given, **named)
        if is_after:
            real(*given, **named)
        raise Injected

    with patch(place, fail):
        yield


def run(seed: int, numbers: Iterable[int], num_gpus: int) -> None:
    """Runs a program of so many operations: each goes on with the random numbers."""
    program = Program(seed, num_gpus)
    try:
        for _ in numbers:
            program.operate()
        program.settle()
        program.compare()
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "\n".join(program.log))
        raise
    finally:
        with suppress(Exception):
            program.optimizer.accept_unfinished_step()
