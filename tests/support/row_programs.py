"""Random programs whose variables get and lose rows, and the same by a list of rows in numpy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable

WIDTH = 3
BIAS = (4,)
RATE, MOMENTUM, ADAGRAD_START, DECAY = 0.25, 0.5, 0.5, 0.75
# Each slot's row of a new row; TensorFlow's RMSProp begins with a mean square of 1.
STARTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "momentum": {"momentum": 0.0},
    "adagrad": {"accumulator": ADAGRAD_START},
    "rms": {"rms": 1.0, "momentum": 0.0},
    "hooks": {"sum": 2.0, "count": 0.0},
}
empty = nullcontext()


class HookSum(gpuopt.Optimizer):
    """As a user of TensorFlow would write it, with a slot of one number a row."""

    def __init__(self) -> None:
        super().__init__(False, "HookSum")

    def _create_slots(self, var_list: Any) -> None:
        for var in var_list:
            self._get_or_make_slot(var, 2.0, "sum", "HookSum")
            if self.get_slot(var, "count") is None:
                self.state.create_slot(var, "count", "count", 0.0, var.shape[:1], np.float32)

    def _new_slot_rows(self, slot_name: str) -> float | None:
        return 0.0 if slot_name == "count" else None

    def _apply_dense(self, grad: Any, var: Any) -> None:
        total, count = self.get_slot(var, "sum"), self.get_slot(var, "count")
        total.assign_add(grad)
        count.assign_add(np.ones(count.shape, np.float32))
        var.assign_sub(RATE * total.value())


class Row:
    """One row, with all that belongs to it."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value.copy()
        self.slots: dict[str, dict[str, np.ndarray]] = {}
        self.averages: dict[str, np.ndarray] = {}

    def step(self, kind: str, g: np.ndarray) -> None:
        s = self.slots[kind]
        if kind == "sgd":
            self.value -= RATE * g
        elif kind == "momentum":
            s["momentum"] = MOMENTUM * s["momentum"] + g
            self.value -= RATE * s["momentum"]
        elif kind == "adagrad":
            s["accumulator"] = s["accumulator"] + g**2
            self.value -= RATE * g / np.sqrt(s["accumulator"])
        elif kind == "rms":
            s["rms"] = s["rms"] + (g**2 - s["rms"]) * (1 - 0.9)
            s["momentum"] = MOMENTUM * s["momentum"] + RATE * g / np.sqrt(s["rms"] + 1e-10)
            self.value -= s["momentum"]
        else:
            s["sum"] = s["sum"] + g
            s["count"] = s["count"] + 1
            self.value -= RATE * s["sum"]

    def start(self, kind: str) -> None:
        starts = STARTS[kind]
        self.slots[kind] = {name: np.full(WIDTH, start) for name, start in starts.items()}


class Program:
    """One program, which does the same to gpuopt and to the model, and compares."""

    def __init__(
        self, seed: int, folder: Path, device: str = "cpu", streams: Sequence[Any] = ()
    ) -> None:
        """Makes a table, a bias that keeps its shape, optimizers and averages.

        Args:
            seed: Of all choices.
            folder: For checkpoints.
            device: Of all variables.
            streams: Each operation is done on one of these.
        """
        self.rng = np.random.default_rng(seed)
        self.folder, self.device, self.streams = folder, device, streams
        height = int(self.rng.integers(0, 7))
        start = self.rng.normal(size=(height, WIDTH))
        self.rows = [Row(value) for value in start]
        self.table = Variable(start, name="table", device=device)
        self.bias = Variable(np.zeros(BIAS), name="bias", device=device)
        self.bias_value = np.zeros(BIAS)
        self.optimizers: dict[str, Any] = {
            "sgd": gpuopt.GradientDescentOptimizer(np.float64(RATE)),
            "momentum": gpuopt.MomentumOptimizer(np.float64(RATE), np.float64(MOMENTUM)),
            "adagrad": gpuopt.AdagradOptimizer(np.float64(RATE), ADAGRAD_START),
            "rms": gpuopt.RMSPropOptimizer(
                np.float64(RATE), np.float64(0.9), np.float64(MOMENTUM), np.float64(1e-10)
            ),
            "hooks": HookSum(),
        }
        self.averaging = gpuopt.MovingAverageOptimizer(self.optimizers["momentum"], DECAY)
        self.averages = gpuopt.ExponentialMovingAverage(DECAY, name="other")
        self.made: set[str] = set()
        self.averaged: set[str] = set()
        self.saves: list[tuple[str, Any, int, set[str], set[str]]] = []
        self.log = [f"seed {seed}: {height} rows"]

    def run(self, length: int) -> None:
        try:
            for _ in range(length):
                with self.streams[self.rng.integers(len(self.streams))] if self.streams else empty:
                    self.operation()
                if self.rng.random() < 0.4:
                    self.compare()
            self.compare()
        except Exception as error:
            error.add_note("\n".join(self.log))
            raise

    def operation(self) -> None:
        operations: list[Callable[[], None]] = [self.dense_step] * 5 + [self.sparse_step] * 3
        operations += [self.keep, self.remove, self.append, self.append, self.reset] * 2
        operations += [self.average, self.refused, self.old_gradient, self.save, self.restore]
        self.rng.choice(np.array(operations, object))()

    def on_device(self, array: Any) -> Any:
        """The array, or at random a copy on the table's device, or a list."""
        chosen = self.rng.integers(3)
        if chosen == 0 or (chosen == 1 and self.device == "cpu"):
            return array
        if chosen == 1:
            return Variable(array, name="given", device=self.device, trainable=False).value()
        return array.tolist() if array.size else array

    def step(self, kind: str, gradient: Any, of_rows: dict[int, np.ndarray]) -> None:
        g = self.rng.normal(size=BIAS)
        optimizer = self.averaging if kind == "momentum" else self.optimizers[kind]
        pairs = [(gradient, self.table)]
        if kind == "sgd":
            pairs.insert(0, (g, self.bias))
            self.bias_value = self.bias_value - RATE * g
        self._track(kind)
        optimizer.apply_gradients(pairs)
        for number, values in of_rows.items():
            self.rows[number].step(kind, values)
        if kind == "momentum":
            self._move("MovingAverage")

    def dense_step(self) -> None:
        kind = str(self.rng.choice(list(STARTS)))
        gradient = self.rng.normal(size=(len(self.rows), WIDTH))
        self.log.append(f"dense step by {kind}")
        given = gradient if self.device == "cpu" else self.on_device(gradient)
        self.step(kind, given, dict(enumerate(gradient)))

    def sparse_step(self) -> None:
        kind = str(self.rng.choice([kind for kind in STARTS if kind != "hooks"]))
        height = len(self.rows)
        if self.rng.random() < 0.5:
            mask = self.rng.random(height) < 0.5
            values = self.rng.normal(size=(height, WIDTH))
            self.log.append(f"step of rows {mask.nonzero()[0]} by a mask by {kind}")
            gradient = IndexedSlices.from_mask(
                Variable(values, device=self.device, name="values").value(), mask
            )
            of_rows = {int(number): values[number] for number in mask.nonzero()[0]}
        else:
            number = int(self.rng.integers(0, 5)) if height else 0
            indices = self.rng.integers(0, max(height, 1), number)
            values = self.rng.normal(size=(number, WIDTH))
            self.log.append(f"step of rows {indices} by {kind}")
            gradient = IndexedSlices(values, indices)
            if self.rng.random() < 0.5:
                gradient = IndexedSlices(
                    Variable(values, device=self.device, name="values").value(),
                    Variable(indices, device=self.device, name="indices").value(),
                    (height, WIDTH),
                )
            of_rows = {}
            for index, row in zip(indices.tolist(), values, strict=True):
                of_rows[index] = of_rows.get(index, 0) + row
        self.step(kind, gradient, of_rows)

    def numbers(self, *, repeated: bool = False) -> tuple[Any, np.ndarray]:
        """Rows as they are given, and their numbers."""
        height = len(self.rows)
        if self.rng.random() < 0.4:
            mask = self.rng.random(height) < 0.6
            return self.on_device(mask), mask.nonzero()[0]
        size = int(self.rng.integers(0, height + 1))
        if repeated and height:
            numbers = self.rng.integers(0, height, size)
        else:
            numbers = self.rng.permutation(height)[:size]
        dtype = self.rng.choice(["int32", "int64", "uint8"])
        return self.on_device(numbers.astype(dtype)), numbers

    def keep(self) -> None:
        given, numbers = self.numbers(repeated=True)
        self.log.append(f"keep {numbers}")
        gpuopt.rows(self.table).keep(given)
        self.rows = [copy.deepcopy(self.rows[number]) for number in numbers]

    def remove(self) -> None:
        given, numbers = self.numbers(repeated=True)
        self.log.append(f"remove {numbers}")
        gpuopt.rows(self.table).remove(given)
        self.rows = [row for number, row in enumerate(self.rows) if number not in numbers]

    def append(self) -> None:
        state_of, numbers = self.numbers(repeated=True)
        is_copied = bool(self.rng.random() < 0.5)
        number = len(numbers) if is_copied else int(self.rng.integers(0, 4))
        values = self.rng.normal(size=(number, WIDTH))
        self.log.append(f"append {number} rows, state of {numbers if is_copied else None}")
        given = values if not number else self.on_device(values)
        gpuopt.rows(self.table).append(given, state_of=state_of if is_copied else None)
        for at in range(number):
            new = Row(values[at])
            if is_copied:
                new = copy.deepcopy(self.rows[numbers[at]])
                new.value = values[at].copy()
            else:
                self._start(new)
            self.rows.append(new)

    def reset(self) -> None:
        given, numbers = self.numbers()
        values = self.rng.normal(size=(len(numbers), WIDTH)) if self.rng.random() < 0.5 else None
        self.log.append(f"reset {numbers}, values: {values is not None}")
        gpuopt.rows(self.table).reset(given, values)
        for at, number in enumerate(numbers):
            if values is not None:
                self.rows[number].value = values[at].copy()
            self._start(self.rows[number])

    def average(self) -> None:
        self.log.append("average")
        self._track_average("other")
        self.averages.apply([self.table])
        self._move("other")

    def refused(self) -> None:
        rows, height = gpuopt.rows(self.table), len(self.rows)
        self.log.append("refused")
        with pytest.raises(IndexError, match=f'rows of "table" to keep: .* not in \\[0, {height}'):
            rows.keep([*range(height), height])
        with pytest.raises(ValueError, match="must have one for each"):
            rows.remove(np.zeros(height + 1, bool))
        with pytest.raises(ValueError, match='rows of "table", which have shape'):
            rows.append(np.zeros((2, WIDTH + 1)))
        with pytest.raises(ValueError, match="there must be one for each"):
            rows.append(np.zeros((height + 1, WIDTH)), state_of=range(height))
        with pytest.raises(ValueError, match=f"values for {height} rows"):
            rows.reset(range(height), np.zeros((height + 1, WIDTH)))

    def old_gradient(self) -> None:
        """Gradients of another number of rows."""
        kind, height = str(self.rng.choice(list(STARTS))), len(self.rows)
        self.log.append(f"a gradient of more rows by {kind}")
        old = np.zeros((height + 1, WIDTH))
        for gradient in (old, IndexedSlices.from_mask(old, np.zeros(height + 1, bool))):
            with pytest.raises(ValueError, match='gradient for "table" has') as raised:
                self.optimizers[kind].apply_gradients([(gradient, self.table)])
            assert str((height, WIDTH)) in str(raised.value)
            assert str((height + 1, WIDTH)) in str(raised.value)

    def save(self) -> None:
        saver = gpuopt.Saver(self._saved(), optimizers=[], max_to_keep=99)
        path = saver.save(self.folder / "model", len(self.saves))
        self.log.append(f"save {path}")
        rows = copy.deepcopy(self.rows)
        self.saves.append((path, rows, len(rows), set(self.made), set(self.averaged)))

    def restore(self) -> None:
        if not self.saves:
            return
        path, rows, height, made, averaged = self.saves[self.rng.integers(len(self.saves))]
        if (made, averaged) != (self.made, self.averaged):
            return
        saver = gpuopt.Saver(self._saved(), optimizers=[])
        self.log.append(f"restore {path} of {height} rows")
        if height != len(self.rows):
            with pytest.raises(gpuopt.CheckpointError) as raised:
                saver.restore(path)
            for shape in ((height, WIDTH), (len(self.rows), WIDTH)):
                assert str(shape) in str(raised.value)
            return
        saver.restore(path)
        self.rows = copy.deepcopy(rows)

    def compare(self) -> None:
        self.check("the table", self.table, [row.value for row in self.rows])
        np.testing.assert_allclose(self.bias.numpy(), self.bias_value, rtol=1e-9, atol=1e-12)
        for kind in self.made:
            for name in STARTS[kind]:
                expected = [row.slots[kind][name] for row in self.rows]
                slot = self.optimizers[kind].get_slot(self.table, name)
                if name == "count":
                    expected = [each[0] for each in expected]
                self.check(slot.name, slot, expected)
                assert slot.name.startswith("table/")
        for name, source in (("MovingAverage", self.averaging.averages), ("other", self.averages)):
            average = source.average(self.table)
            assert (average is not None) == (name in self.averaged)
            if average is not None:
                self.check(name, average, [row.averages[name] for row in self.rows])

    def check(self, what: str, variable: Variable, expected: list[Any]) -> None:
        shape = (len(self.rows), *variable.shape[1:])
        wanted = np.array(expected, float).reshape(shape)
        got = np.float64(variable.numpy())
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-9, err_msg=what)

    def _saved(self) -> list[Variable]:
        slots = [
            self.optimizers[kind].get_slot(self.table, name)
            for kind in sorted(self.made)
            for name in STARTS[kind]
        ]
        found = (each.average(self.table) for each in (self.averaging.averages, self.averages))
        return [self.table, *slots, *(each for each in found if each is not None)]

    def _track(self, kind: str) -> None:
        if kind not in self.made:
            self.made.add(kind)
            for row in self.rows:
                row.start(kind)
        if kind == "momentum":
            self._track_average("MovingAverage")

    def _track_average(self, name: str) -> None:
        if name not in self.averaged:
            self.averaged.add(name)
            for row in self.rows:
                row.averages[name] = row.value.copy()

    def _start(self, row: Row) -> None:
        for kind in self.made:
            row.start(kind)
        row.averages = {name: row.value.copy() for name in self.averaged}

    def _move(self, name: str) -> None:
        for row in self.rows:
            average = row.averages[name]
            row.averages[name] = average - (1 - DECAY) * (average - row.value)
