"""Random programs on two GPUs whose streams run late, beside the naive model.

A program orders only what its user has to: a gradient before the step that takes it. It drops
arrays as soon as gpuopt has been called with them, and gets memory of the same size on the stream
that owned them: what it writes there must stay.
"""

from __future__ import annotations

import copy
import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from fuzzing.model import Adagrad, Adam, GradientDescent, Momentum, NaiveOptimizer, NaivePair, Rows
from fuzzing.model import step as naive_step
from gpuopt import IndexedSlices, Variable

OPERATIONS = 16
SHAPES = ((6,), (4, 3))
TABLE = (8, 4)
RATE = 0.5
NUM_STREAMS = 3
READINGS: tuple[Callable[[Any], Any], ...] = (
    lambda v: v + v,
    lambda v: 1 - v,
    lambda v: v[[1, 2]] * 3,
    lambda v: v.sum(axis=0),
    lambda v: np.concatenate([v, v]),
)


@functools.cache
def streams_of(device: int) -> list[Any]:
    """The default stream, and others that do not wait for it; gpuopt knows them all."""
    import cupy

    streams = [cupy.cuda.Stream.null, *(new_stream(device) for _ in range(NUM_STREAMS - 1))]
    for stream in streams:
        with cupy.cuda.Device(device), stream:
            Variable(0, device=f"gpu:{device}")
    return streams


@contextmanager
def current(streams: Sequence[Any]) -> Iterator[None]:
    """Makes streams the current ones, one of each GPU; the first GPU is current."""
    import cupy

    with ExitStack() as stack:
        for device in (1, 0):
            stack.enter_context(cupy.cuda.Device(device))
            stack.enter_context(streams[device])
        yield


class Trained(NamedTuple):
    """Something that is trained.

    Attributes:
        label: Its name in the model.
        given: A Variable or a raw array.
        device: The index of its GPU.
        constrained: Whether it is halved after each dense step.
    """

    label: str
    given: Any
    device: int
    constrained: bool

    @property
    def is_table(self) -> bool:
        return bool(self.given.shape == TABLE)


class PlantedError(Exception):
    pass


class Rate:
    """A learning rate that can fail."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self) -> float:
        if self.fails:
            raise PlantedError
        return RATE


class Trainer(NamedTuple):
    optimizer: gpuopt.Optimizer
    naive: NaiveOptimizer
    rate: Rate
    step: Variable
    count: list[int]


def new_trainer(kind: int) -> Trainer:
    rate = Rate()
    made: tuple[gpuopt.Optimizer, NaiveOptimizer]
    if kind == 0:
        made = gpuopt.GradientDescentOptimizer(rate), GradientDescent()
    elif kind == 1:
        made = gpuopt.MomentumOptimizer(rate, 0.5), Momentum(0.5, False)
    elif kind == 2:
        made = gpuopt.AdagradOptimizer(rate, initial_accumulator_value=0.25), Adagrad()
    else:
        made = gpuopt.AdamOptimizer(rate, *Adam.betas, epsilon=Adam.epsilon), Adam()
    return Trainer(*made, rate, Variable(0), [0])


class Program:
    """One random program.

    Attributes:
        log: What it has done so far.
    """

    def __init__(self, seed: int) -> None:
        self.log: list[str] = []
        self._seed = seed
        self._rng = np.random.default_rng([seed])
        self._values: dict[str, np.ndarray] = {}
        self._trained: list[Trained] = []
        self._num_made = 0
        # (an array, its GPU, its stream, what is in it)
        self._canaries: list[tuple[Any, int, Any, np.ndarray]] = []
        self._trainers = [new_trainer(int(kind)) for kind in self._rng.choice(4, 2, replace=False)]
        self._average = gpuopt.ExponentialMovingAverage(0.5)
        self._averages: dict[str, np.ndarray] = {}
        for _ in range(5):
            self._make()

    def run(self, number: int) -> None:
        self._rng = np.random.default_rng([self._seed, number])
        operations: list[tuple[float, Callable[[], str]]] = [
            (8, self._step),
            (3, self._bad_rows),
            (1.5, self._failing_step),
            (2, self._assign),
            (1.5, self._arithmetic),
            (2, self._apply_average),
            (1.5, self._threads),
            (1.5, self._replace),
            (1, self._replace_trainer),
            (1, self._look),
        ]
        weights = np.array([weight for weight, _ in operations])
        chosen = operations[self._rng.choice(len(operations), p=weights / weights.sum())][1]
        self.log.append(f"{number}: {chosen.__name__} was not finished")
        self.log[-1] = f"{number}: {chosen()}"

    def check(self) -> None:
        """Compares everything with the model."""
        for trained in self._trained:
            self._compare(trained)
        for trained in self._trained:
            if trained.label in self._averages:
                shadow = self._average.average(trained.given)
                assert shadow is not None
                self._assert_close(
                    f"average of {trained.label}", shadow.numpy(), self._averages[trained.label]
                )
        for trainer in self._trainers:
            assert int(trainer.step) == trainer.count[0]
        for array, device, stream, expected in self._canaries:
            with self._on(device, stream):
                self._assert_close("a canary", array.get(), expected)

    # What a program does

    def _step(self) -> str:
        trainer = self._choose(self._trainers)
        number = int(self._rng.integers(1, len(self._trained) + 1))
        chosen = [self._trained[i] for i in self._rng.permutation(len(self._trained))[:number]]
        streams = self._streams()
        self._apply(trainer, chosen, streams)
        return f"step of {type(trainer.naive).__name__} for {[t.label for t in chosen]}"

    def _failing_step(self) -> str:
        """A step whose user code fails, after everything has been made for it."""
        trainer = self._choose(self._trainers)
        trainer.rate.fails = True
        try:
            self._apply(trainer, self._trained, self._streams())
        except PlantedError:
            return f"failing step of {type(trainer.naive).__name__}"
        finally:
            trainer.rate.fails = False
        raise AssertionError("the step was done without its rate")

    def _bad_rows(self) -> str:
        """Calls of one optimizer on one GPU, of which some have a bad row."""
        trainer = self._choose(self._trainers)
        device = int(self._rng.integers(2))
        here = [trained for trained in self._trained if trained.device == device]
        if not any(trained.is_table for trained in here):
            return "no bad rows"
        before: Any = None
        said = []
        for _ in range(int(self._rng.integers(1, 5))):
            number = int(self._rng.integers(1, len(here) + 1))
            chosen = [here[i] for i in self._rng.permutation(number)]
            is_bad = self._happens(0.5) and any(trained.is_table for trained in chosen)
            now = self._snapshot(trainer)
            if is_bad and before is None:
                before = now
            try:
                self._apply(trainer, chosen, self._streams(), has_bad_row=is_bad)
                said.append("bad" if is_bad else "good")
            except IndexError:
                assert before is not None, f"no row was bad: {said}"
                # A call that raises for itself, because of a constraint, or for an earlier one.
                self._restore(trainer, before)
                before = None
                said.append("raised")
        try:
            trainer.optimizer.check()
            assert before is None, "a bad row was not found"
        except IndexError:
            assert before is not None, f"no row was bad: {said}"
            self._restore(trainer, before)
        return f"{type(trainer.naive).__name__} on gpu:{device} with rows {said}"

    def _assign(self) -> str:
        target = self._choose([t for t in self._trained if isinstance(t.given, Variable)])
        alike = [
            t
            for t in self._trained
            if t is not target
            and isinstance(t.given, Variable)
            and t.given.shape == target.given.shape
        ]
        with current(self._streams()) as _, self._passing(target.device) as new:
            value: Any
            if alike and self._happens(0.6):
                source = self._choose(alike)
                value, expected = source.given, self._values[source.label]
            else:
                value, expected = new(self._numbers(target.given.shape))
            if self._happens(0.5):
                target.given.assign(value)
                self._values[target.label] = expected.copy()
                return f"{target.label} assigned"
            target.given.assign_add(value)
            self._values[target.label] = self._values[target.label] + expected
        return f"{target.label} added to"

    def _arithmetic(self) -> str:
        """Arithmetic whose result is looked at later."""
        trained = self._choose([t for t in self._trained if isinstance(t.given, Variable)])
        read = self._choose(READINGS)
        stream = self._choose(streams_of(trained.device))
        with self._on(trained.device, stream):
            found = read(trained.given)
        self._canaries.append((found, trained.device, stream, read(self._values[trained.label])))
        return f"arithmetic on {trained.label}"

    def _apply_average(self) -> str:
        number = int(self._rng.integers(1, len(self._trained) + 1))
        chosen = [t for t in self._trained[:number] if isinstance(t.given, Variable)]
        with current(self._streams()):
            self._average.apply([trained.given for trained in chosen])
        for label in (trained.label for trained in chosen):
            value = self._values[label]
            self._averages[label] = self._averages.get(label, value) * 0.5 + value * 0.5
        return f"average of {[trained.label for trained in chosen]}"

    def _threads(self) -> str:
        trainers = [t for t in self._trainers if not isinstance(t.naive, Adam)]
        if not trainers:
            return "no threads"
        trainer = self._choose(trainers)
        plans = [
            [(self._streams(), self._gradient_values(each)) for _ in range(3)]
            for each in self._trained[:3]
        ]
        errors: list[BaseException] = []

        def work(trained: Trained, plan: list[Any]) -> None:
            try:
                for streams, values in plan:
                    with current(streams), self._on(trained.device, streams[trained.device]):
                        gradient = uploaded(values, device=trained.device)
                        trainer.optimizer.apply_gradients([(gradient, trained.given)], trainer.step)
                        gradient.fill(99)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=each)
            for each in zip(self._trained, plans, strict=False)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for trained, plan in zip(self._trained, plans, strict=False):
            for _, values in plan:
                self._model(trainer, [(trained, values)])
        # The count is a plain number, to which threads add one after the other or at once.
        trainer.step.assign(trainer.count[0])
        return f"threads of {type(trainer.naive).__name__}"

    def _replace(self) -> str:
        gone = self._trained.pop(int(self._rng.integers(len(self._trained))))
        label = gone.label
        del gone
        for trainer in self._trainers:
            trainer.naive.forget(label)
        del self._values[label]
        self._averages.pop(label, None)
        self._plant(int(self._rng.integers(2)), None, 24)
        return f"{label} replaced by {self._make()}"

    def _replace_trainer(self) -> str:
        self._trainers.pop(0)
        self._trainers.append(new_trainer(int(self._rng.integers(4))))
        for device in range(2):
            self._plant(device, None, 24)
        return f"{type(self._trainers[-1].naive).__name__} instead of another"

    def _look(self) -> str:
        with current(self._streams()):
            trained = self._choose(self._trained)
            self._compare(trained)
        return f"a look at {trained.label}"

    # What it does it with

    def _apply(
        self,
        trainer: Trainer,
        chosen: Sequence[Trained],
        streams: Sequence[Any],
        has_bad_row: bool = False,
    ) -> None:
        pairs, modelled = [], []
        with current(streams), ExitStack() as passing:
            for trained in chosen:
                new = passing.enter_context(self._passing(trained.device))
                given, expected = self._gradient(trained, new, has_bad_row)
                pairs.append((given, trained.given))
                modelled.append((trained, expected))
                del given
            try:
                trainer.optimizer.apply_gradients(pairs, trainer.step)
            finally:
                for gradient, _ in pairs:
                    if isinstance(gradient, np.ndarray):
                        gradient[...] = 77
                pairs.clear()
        if not has_bad_row:
            self._model(trainer, modelled)

    def _gradient(
        self, trained: Trained, new: Callable[..., tuple[Any, np.ndarray]], has_bad_row: bool
    ) -> tuple[Any, Any]:
        """Returns a gradient and its value for the model."""
        if trained.is_table and (has_bad_row or self._happens(0.6)):
            number = int(self._rng.integers(0 if not has_bad_row else 1, 12))
            rows = self._rng.integers(0, TABLE[0], number)
            if has_bad_row:
                rows[self._rng.integers(number)] = self._choose([-1, TABLE[0], 2**40])
            values, expected = new(self._numbers((number, TABLE[1])))
            if isinstance(values, np.ndarray):
                values = values.copy()
            on_gpu = has_bad_row or self._happens(0.7)
            indices = new(rows, only_here=True)[0] if on_gpu else rows
            return IndexedSlices(values, indices), Rows(expected, rows)
        alike = [
            each
            for each in self._trained
            if isinstance(each.given, Variable) and each.given.shape == trained.given.shape
        ]
        if alike and isinstance(trained.given, Variable) and self._happens(0.1):
            source = self._choose(alike)
            return source.given, self._values[source.label].copy()
        return new(self._gradient_values(trained))

    def _gradient_values(self, trained: Trained) -> np.ndarray:
        return self._numbers(trained.given.shape)

    @contextmanager
    def _passing(self, device: int) -> Iterator[Callable[..., tuple[Any, np.ndarray]]]:
        """Yields a function that makes arrays; their memory is used again after the block."""
        import cupy

        made: list[tuple[int, Any, int]] = []

        def new(host: np.ndarray, only_here: bool = False) -> tuple[Any, np.ndarray]:
            kind = self._rng.random()
            if kind < 0.15 and not only_here:
                return host.copy(), host.astype(np.float64)
            place = 1 - device if kind < 0.35 and not only_here else device
            owner = self._choose(streams_of(place))
            with self._on(place, owner):
                if kind < 0.55 and host.size:
                    array = uploaded(np.repeat(host, 2, axis=0), owner, place)[::2]
                elif kind < 0.65 and host.ndim == 2 and host.size:
                    array = uploaded(np.ascontiguousarray(host.T), owner, place).T
                else:
                    array = uploaded(host, owner, place)
                ready = owner.record()
            # The user's duty: the stream that is current in the call follows the gradient's.
            with cupy.cuda.Device(place):
                here = cupy.cuda.get_current_stream()
                here.wait_event(ready)
            made.append((place, owner, host.size * (2 if kind < 0.55 else 1)))
            return array, host.astype(np.float64)

        yield new
        gc.collect(0)
        for place, owner, size in made:
            self._plant(place, owner, size)

    def _plant(self, device: int, stream: Any, size: int) -> None:
        """Gets memory on a stream, as after something was freed there, and writes to it."""
        import cupy

        stream = stream or self._choose(streams_of(device))
        with self._on(device, stream):
            mark = np.float32(self._rng.integers(1000, 2000))
            array = cupy.full(size, mark, np.float32)
        self._canaries.append((array, device, stream, np.full(size, mark)))
        if len(self._canaries) > 12:
            self._canaries.pop(int(self._rng.integers(12)))

    def _make(self) -> str:
        self._num_made += 1
        device = int(self._rng.integers(2))
        kind = self._rng.random()
        shape = TABLE if self._happens(0.5) or self._num_made == 1 else self._choose(SHAPES)
        host = self._numbers(shape)
        stream = self._choose(streams_of(device))
        constrained = kind < 0.6 and shape != TABLE and self._happens(0.3)
        constraint = (lambda array: array * np.float32(0.5)) if constrained else None
        given: Any
        with self._on(device, stream):
            if kind < 0.6:
                given = Variable(host, constraint=constraint, device=f"gpu:{device}")
            elif kind < 0.8:
                doubled = uploaded(np.repeat(host, 2, axis=0), stream, device)
                given = Variable(doubled[::2], copy=False)
                stream.synchronize()
            else:
                given = uploaded(host, stream, device)
                stream.synchronize()
        label = f"{'raw' if kind >= 0.8 else 'variable'} {self._num_made} on gpu:{device}"
        self._trained.append(Trained(label, given, device, constrained))
        self._values[label] = host.astype(np.float64)
        return label

    # The model

    def _model(self, trainer: Trainer, pairs: Sequence[tuple[Trained, Any]]) -> None:
        naive = []
        for trained, gradient in pairs:
            constrain = _halve if trained.constrained else None
            w = self._values[trained.label]
            naive.append(NaivePair(lambda g=gradient: g, trained.label, w, constrain))
        naive_step(trainer.naive, naive, RATE)
        trainer.count[0] += 1

    def _snapshot(self, trainer: Trainer) -> Any:
        return copy.deepcopy((self._values, trainer.naive.__dict__, trainer.count[0]))

    def _restore(self, trainer: Trainer, snapshot: Any) -> None:
        self._values, attributes, trainer.count[0] = copy.deepcopy(snapshot)
        trainer.naive.__dict__.update(attributes)

    def _compare(self, trained: Trained) -> None:
        import cupy

        if isinstance(trained.given, Variable):
            got = trained.given.numpy()
        else:
            cupy.cuda.Device(trained.device).synchronize()
            with cupy.cuda.Device(trained.device):
                got = trained.given.get()
        self._assert_close(trained.label, got, self._values[trained.label])

    @staticmethod
    def _assert_close(what: str, got: np.ndarray, expected: np.ndarray) -> None:
        # float32, after some dozens of steps of numbers of about 1.
        if not np.allclose(got, expected, rtol=1e-3, atol=1e-3):
            raise AssertionError(f"{what}: {got.tolist()} is not {expected.tolist()}")

    # Chance

    def _streams(self) -> list[Any]:
        return [self._choose(streams_of(device)) for device in range(2)]

    @contextmanager
    def _on(self, device: int, stream: Any) -> Iterator[None]:
        import cupy

        with cupy.cuda.Device(device), stream:
            yield

    def _numbers(self, shape: tuple[int, ...]) -> np.ndarray:
        return (self._rng.integers(-8, 9, shape) / 8).astype(np.float32)

    def _choose(self, items: Sequence[Any]) -> Any:
        return items[int(self._rng.integers(len(items)))]

    def _happens(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)


def _halve(array: np.ndarray) -> None:
    array *= 0.5


def run(seed: int, numbers: Iterable[int]) -> None:
    """Runs a program; what it raises says what it has done."""
    wait_for_gpus()
    program = Program(seed)
    try:
        for number in numbers:
            program.run(number)
        program.check()
    except BaseException as error:
        error.add_note("\n".join([f"The program of seed {seed} so far:", *program.log]))
        raise
    finally:
        wait_for_gpus()
