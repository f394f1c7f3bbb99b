"""Random programs of tables whose rows catch up, beside a model that moves all rows in each step.

What an operation does follows from the program's seed and the operation's number alone. The model
is compared with what an operation reads, and not more: a comparison brings rows up to date.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.numpy import load_file

import gpuopt
from fuzzing import model
from gpuopt import IndexedSlices, Variable, backends
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.rules.catch_up import Factors

# Exact in float32, as a float given to an optimizer is rounded to it.
BETAS1 = [0.0, 0.5, 0.875, 0.9375]
BETAS2 = [0.75, 0.9375, 1 - 2**-8, 1 - 2**-10]
EPSILONS = [2.0**-27, 2.0**-17, 2.0**-10, 1.0]
RATES = [2.0**-6, 2.0**-4, 2.0**-10, 0.0, -(2.0**-7)]
CLIP_NORM = 0.5
DECAY = 0.75
# Of the largest number in an array, between two comparisons.
TOLERANCE = {"float32": 4e-5, "float64": 1e-6}


class Table:
    """A table, and what it should hold."""

    def __init__(self, label: str, value: np.ndarray) -> None:
        self.label, self.shape, self.dtype = label, value.shape, value.dtype
        self.real = Variable(value)
        self.expected = value.astype(np.float64)


class Trainer:
    """An optimizer and its model, which has all of its numbers.

    Attributes:
        real: The optimizer.
        model: What it should do.
        rate: Of tables in no group.
        groups: The learning rate and epsilon of each table that has its own.
    """

    def __init__(self, name: str, kind: str, program: Program) -> None:
        rng = program.rng
        self.name, self.kind, self.groups = name, kind, {}
        self.largest: dict[tuple[str, str], float] = {}
        self.model: Any = getattr(model, kind)()
        self.rate = program.choose(RATES)
        self.clips = bool(kind == "Adam" and rng.random() < 0.25)
        if isinstance(self.model, model.Adam):
            self.model.betas = program.choose(BETAS1), program.choose(BETAS2)
            self.model.epsilon = program.choose(EPSILONS)
            if rng.random() < 0.4:
                label = program.choose(program.tables).label
                self.groups[label] = program.choose(RATES), program.choose(EPSILONS)
        self.make(program, True)

    def make(self, program: Program, catch_up: Any) -> None:
        """Makes the optimizer, in one of its forms."""
        options: dict[str, Any] = {}
        if isinstance(self.model, model.Adam):
            beta1, beta2 = self.model.betas
            options = {"beta1": beta1, "beta2": beta2, "epsilon": self.model.epsilon}
            options["groups"] = [
                gpuopt.ParameterGroup(variables=[each.real], learning_rate=rate, epsilon=epsilon)
                for each in program.tables
                if each.label in self.groups
                for rate, epsilon in [self.groups[each.label]]
            ]
        if self.kind == "Adam":
            options |= {"catch_up": catch_up, "clip_norm": CLIP_NORM if self.clips else None}
        options["name"] = self.name
        self.real = getattr(gpuopt, f"{self.kind}Optimizer")(self.rate, **options)
        manager = gpuopt.FixedLossScaleManager(8)
        self.scaled = gpuopt.LossScaleOptimizer(self.real, manager, host_may_wait=True)

    def step(self, gradients: dict[str, Any], tables: list[Table], *, scaled: bool) -> None:
        """Makes a step, which is left out if a gradient is not finite."""
        optimizer = self.scaled if scaled else self.real
        optimizer.apply_gradients(
            [(_given(gradients[each.label], each.dtype), each.real) for each in tables]
        )
        values = [getattr(each, "values", each) for each in gradients.values()]
        for each in tables:
            self.model.make_slots(each.label, each.expected)
        if not all(np.isfinite(each).all() for each in values):
            return
        norm = np.sqrt(sum(float(np.sum(each * each)) for each in values))
        factor = CLIP_NORM / max(norm, CLIP_NORM) if self.clips else 1.0
        usual = getattr(self.model, "epsilon", None)
        for each in tables:
            rate, epsilon = self.groups.get(each.label, (self.rate, usual))
            self.model.epsilon = epsilon
            gradient = gradients[each.label]
            if isinstance(gradient, model.Rows):
                gradient = gradient._replace(values=factor * gradient.values)
            else:
                gradient = factor * gradient
            self.model.update(each.label, each.expected, gradient, rate)
        self.model.epsilon = usual
        self.model.finish([])
        for name, by_label in self.model.slots.items():
            for label, slot in by_label.items():
                known = self.largest.get((name, label), 0.0)
                self.largest[name, label] = max(known, float(np.abs(slot).max()))

    def compare_slots(self, table: Table) -> None:
        """Compares a table's slots; rounding is of the largest numbers since the last time."""
        for name, by_label in self.model.slots.items():
            slot = self.real.get_slot(table.real, name)
            assert (slot is not None) == (table.label in by_label), (table.label, name)
            if slot is not None:
                what = f"{name} of {table.label} by {self.kind}"
                largest = self.largest.pop((name, table.label), 0.0)
                compare(what, slot.numpy(), by_label[table.label], largest)


class Program:
    """One random program; `log` says what it has done."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.rng = rng = np.random.default_rng([seed])
        self.log: list[str] = []
        self.dtype = np.dtype(self.choose(["float32", "float64"]))
        width = int(rng.integers(1, 6))
        self.tables = [
            Table(f"table{number}", rng.normal(size=(height, width)).astype(self.dtype))
            for number, height in enumerate(rng.integers(3, 40, 2))
        ]
        kinds = ["Adam", self.choose(["Adam", "LazyAdam", "GradientDescent"])]
        self.trainers = [Trainer(f"T{number}", kind, self) for number, kind in enumerate(kinds)]
        self.averages: dict[str, Any] = {}
        self.saved: list[Any] = []

    def choose(self, items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def run(self, number: int) -> None:
        """Does operation `number`."""
        self.rng = np.random.default_rng([self.seed, number])
        weights = np.array([weight for weight, _ in OPERATIONS])
        operation = OPERATIONS[self.rng.choice(len(weights), p=weights / weights.sum())][1]
        self.log.append(f"{number}: {operation.__name__}")
        operation(self)

    def gradient(self, table: Table, *, once: bool, dense: bool) -> Any:
        """Draws a gradient; of the float type's numbers, so that both see the same."""
        scale = self.choose([1.0, 1.0, 2.0**-10, 2.0**-20])
        if dense:
            return (scale * self.rng.normal(size=table.shape)).astype(self.dtype).astype(float)
        count = int(self.rng.integers(0, 6))
        rows = self.rng.integers(0, max(len(table.expected) // 2, 1), count)
        rows = np.unique(rows) if once else rows
        values = scale * self.rng.normal(size=(len(rows), *table.shape[1:]))
        return model.Rows(values.astype(self.dtype).astype(float), rows)

    def check(self) -> None:
        """Compares everything."""
        for table in self.tables:
            compare(table.label, table.real.numpy(), table.expected)
            for trainer in self.trainers:
                trainer.compare_slots(table)


def compare(what: str, real: Any, expected: np.ndarray, largest: float = 0.0) -> None:
    """Compares, and has the model go on from the real numbers.

    Args:
        what: For the message.
        real: The real numbers.
        expected: What they should be.
        largest: What they were made of may have been as large.
    """
    got = np.asarray(real)
    scale = max(float(np.abs(expected).max(initial=0)), largest)
    tolerance = TOLERANCE[got.dtype.name] * scale + 1e-30
    assert np.abs(got - expected).max(initial=0) <= tolerance, f"{what}: {got} {expected}"
    expected[...] = got


def step(program: Program) -> None:
    trainer = program.choose(program.trainers)
    for _ in range(int(program.choose([1, 1, 3, 30]))):
        tables = [each for each in program.tables if program.rng.random() < 0.7]
        dense = program.rng.random() < 0.02
        if tables:
            gradients = {
                each.label: program.gradient(each, once=trainer.clips, dense=dense)
                for each in tables
            }
            trainer.step(gradients, tables, scaled=bool(program.rng.random() < 0.2))


def by_turns(program: Program) -> None:
    for _ in range(5):
        for trainer in program.trainers:
            table = program.choose(program.tables)
            gradient = program.gradient(table, once=trainer.clips, dense=False)
            trainer.step({table.label: gradient}, [table], scaled=False)


def skipped_step(program: Program) -> None:
    trainer, table = program.choose(program.trainers), program.choose(program.tables)
    gradient = program.gradient(table, once=True, dense=False)
    if gradient.values.size:
        gradient.values[-1] = np.inf
        trainer.step({table.label: gradient}, [table], scaled=True)


def look_up(program: Program) -> None:
    table = program.choose(program.tables)
    ids = program.rng.integers(0, len(table.expected), (2, 3))
    _compare_rows(table, ids, gpuopt.embedding_lookup(table.real, ids))


def read(program: Program) -> None:
    table = program.choose(program.tables)
    compare(table.label, table.real.numpy(), table.expected)


def read_slot(program: Program) -> None:
    trainer, table = program.choose(program.trainers), program.choose(program.tables)
    trainer.compare_slots(table)


def assign(program: Program) -> None:
    table = program.choose(program.tables)
    value = program.rng.normal(size=table.shape).astype(program.dtype)
    first = int(program.rng.integers(0, len(value)))
    if first % 2:
        table.real.assign(value)
        table.expected[...] = value
    else:
        table.real[first:] = value[first:]
        table.expected[first:] = value[first:]


def assign_slot(program: Program) -> None:
    trainer, table = program.choose(program.trainers), program.choose(program.tables)
    for name, by_label in trainer.model.slots.items():
        if table.label in by_label:
            value = program.rng.uniform(0.5, 1, table.shape).astype(program.dtype)
            trainer.real.get_slot(table.real, name).assign(value)
            by_label[table.label][...] = value


def delete_slot(program: Program) -> None:
    trainer, table = program.choose(program.trainers), program.choose(program.tables)
    names = [name for name, of in trainer.model.slots.items() if table.label in of]
    if names:
        name = program.choose(names)
        del trainer.real.state.table(name)[table.real.identity]
        del trainer.model.slots[name][table.label]
        gradient = program.gradient(table, once=True, dense=False)  # makes it anew
        trainer.step({table.label: gradient}, [table], scaled=False)


def change(program: Program) -> None:
    trainer = program.choose(program.trainers)
    naive, given = trainer.model, trainer.real.hyperparameters
    trainer.rate = rate = program.choose(RATES)
    given["learning_rate"] = program.choose([rate, lambda: rate])
    if isinstance(naive, model.Adam) and program.rng.random() < 0.5:
        naive.betas = program.choose(BETAS1), program.choose(BETAS2)
        naive.epsilon = program.choose(EPSILONS)
        given["beta1"], given["beta2"] = naive.betas
        given["epsilon"] = naive.epsilon


def average(program: Program) -> None:
    table = program.choose(program.tables)
    if table.label not in program.averages:
        made = gpuopt.ExponentialMovingAverage(DECAY)
        program.averages[table.label] = made, table.expected.copy()
    made, expected = program.averages[table.label]
    made.apply([table.real])
    expected -= (1 - DECAY) * (expected - table.expected)
    compare("average", made.average(table.real).numpy(), expected)


def save(program: Program) -> None:
    path = _saver(program).save(program.folder / f"model{len(program.saved)}")
    tensors = load_file(path)
    for table in program.tables:
        compare(f"{table.label} in a file", tensors[table.label], table.expected)
    models = copy.deepcopy([each.model for each in program.trainers])
    program.saved.append((path, [each.expected.copy() for each in program.tables], models))


def restore(program: Program) -> None:
    if not program.saved:
        return
    path, values, models = program.choose(program.saved)
    labels = [each.label for each in program.tables]
    states = [each.state() for each in models]
    trainers = program.trainers
    if all(one.model.accepts(state, labels) for one, state in zip(trainers, states, strict=True)):
        _saver(program).restore(path)
        for trainer, state in zip(trainers, states, strict=True):
            trainer.model.load(state, labels)
        for table, value in zip(program.tables, values, strict=True):
            table.expected[...] = value


def make_again(program: Program) -> None:
    """Restores what was just saved into optimizers of another form."""
    form = program.choose([True, False, "stepping"])
    states = []
    for trainer in program.trainers:
        states.append(trainer.real.state_dict(_named(program)))
        del trainer.real, trainer.scaled
    gc.collect()
    for trainer, state in zip(program.trainers, states, strict=True):
        trainer.make(program, form)
        trainer.real.load_state_dict(state, _named(program))


def flush(program: Program) -> None:
    for trainer in program.trainers:
        trainer.real.flush()


def threads(program: Program) -> None:
    """One thread steps by one table, and others read the other one and its slots."""
    stepped, other = program.tables if program.rng.random() < 0.5 else program.tables[::-1]
    trainer = program.choose(program.trainers)
    gradients = [program.gradient(stepped, once=True, dense=False) for _ in range(8)]
    ids = program.rng.integers(0, len(other.expected), (4, 5))
    failed: list[BaseException] = []
    looked_up: list[Any] = []

    def steps() -> None:
        for gradient in gradients:
            trainer.step({stepped.label: gradient}, [stepped], scaled=False)

    def reads() -> None:
        for some in ids:
            looked_up.append((some, gpuopt.embedding_lookup(other.real, some)))

    def watched(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # raised again by the program's thread
            failed.append(error)

    calls = [steps, reads, reads, program.choose([reads, other.real.numpy])]
    started = [threading.Thread(target=watched, args=(call,)) for call in calls]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failed:
        raise failed[0]
    for some, rows in looked_up:
        _compare_rows(other, some, rows)


OPERATIONS: list[tuple[float, Callable[[Program], None]]] = [
    (12, step),
    (3, by_turns),
    (2, skipped_step),
    (4, look_up),
    (2, read),
    (2, read_slot),
    (2, assign),
    (1, assign_slot),
    (1, delete_slot),
    (3, change),
    (1, average),
    (2, save),
    (2, restore),
    (1, make_again),
    (1, flush),
    (1, threads),
]


def run(seed: int, numbers: Iterable[int]) -> None:
    """Runs a program; what it raises says how to repeat it.

    Args:
        seed: Decides what the program works on, and what each operation does.
        numbers: Which operations.
    """
    gc.collect()  # frees the names of an earlier program's variables
    rng = np.random.default_rng([seed, 2**31])
    with ExitStack() as stack:
        if rng.random() < 0.5:  # everything is compiled, and shared by threads
            limits = CpuLimits(small_elements=1, large_elements=0, elements_per_thread=1)
            stack.enter_context(backends.using(Device.cpu, CpuBackend(limits)))
        room = int(rng.choice([7, 64, 1024]))
        stack.enter_context(patch.object(Factors, "room_for", lambda self, height: room))
        program = Program(seed, Path(stack.enter_context(TemporaryDirectory())))
        done = []
        try:
            for number in numbers:
                done.append(str(number))
                program.run(number)
            program.check()
        except BaseException as error:
            repeat = f"GPUOPT_FUZZ_SEED={seed} GPUOPT_FUZZ_ONLY={','.join(done)} make test"
            file = "tests/fuzz/test_rows_that_catch_up.py"
            lines = ["The program so far:", *program.log, f'To repeat it: {repeat} ARGS="{file}"']
            error.add_note("\n".join(lines))
            raise


def _given(gradient: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(gradient, model.Rows):
        return IndexedSlices(gradient.values.astype(dtype), gradient.indices)
    return gradient.astype(dtype)


def _compare_rows(table: Table, ids: np.ndarray, rows: Any) -> None:
    compare(f"rows {ids} of {table.label}", rows, table.expected[ids])


def _named(program: Program) -> dict[str, Variable]:
    return {each.label: each.real for each in program.tables}


def _saver(program: Program) -> gpuopt.Saver:
    return gpuopt.Saver(_named(program), optimizers=[each.real for each in program.trainers])
