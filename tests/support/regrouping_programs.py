"""Random programs in which groups and rows change, and the same in arrays of numpy."""

from __future__ import annotations

import copy
import gc
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Saver, Variable

WIDTH = 3
# Powers of beta are float32, as TensorFlow's.
TOLERANCE = 2e-5
CLASSES: dict[str, Any] = {
    "momentum": gpuopt.MomentumOptimizer,
    "lazy": gpuopt.LazyAdamOptimizer,
    "adam_w": gpuopt.AdamWOptimizer,
}
ADAM = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
BASE = {
    "momentum": {"learning_rate": 0.1, "momentum": 0.5},
    "lazy": ADAM,
    "adam_w": {**ADAM, "weight_decay": 0.05},
}
SLOTS = {"momentum": ["momentum"], "lazy": ["m", "v"], "adam_w": ["m", "v"]}
# Names with what regular expressions, files and paths give a meaning to.
TABLES = ("table.*", "table|2")
NAMES = (*TABLES, "wé/a", "bias")


class Program:
    """One program, which does the same to gpuopt and to arrays of numpy, and compares.

    Attributes:
        model: By variable: "w", and "<optimizer>/<slot>".
        steps: How many steps each optimizer has made.
        numbers: By optimizer and variable: the hyperparameters.
    """

    def __init__(
        self, seed: int, folder: Path, device: str = "cpu", streams: Sequence[Any] = ()
    ) -> None:
        """Makes variables and optimizers; the arguments are those of `row_programs.Program`."""
        self.rng = np.random.default_rng([16, seed])
        self.folder, self.device, self.streams = folder, device, streams
        self.log: list[str] = []
        self.variables: dict[str, Variable] = {}
        self.model: dict[str, dict[str, np.ndarray]] = {}
        for name in NAMES:
            size = int(self.rng.integers(1, 5))
            start = self.rng.normal(size=(size, WIDTH) if name in TABLES else size)
            self.variables[name] = Variable(start, name=name, device=device)
            self.model[name] = {"w": start.copy()}
        self.steps = dict.fromkeys(CLASSES, 0)
        self.optimizers: dict[str, Any] = {}
        self.numbers: dict[str, dict[str, dict[str, float]]] = {}
        for kind in CLASSES:
            self.make(kind)
        self.saves: list[tuple[str, Any, dict[str, int]]] = []

    def run(self, length: int) -> None:
        operations: list[Callable[[], None]] = [self.step] * 5 + [self.change_rows] * 4
        operations += [self.set, self.regroup, self.save, self.restore]
        try:
            for _ in range(length):
                stream = (
                    self.streams[self.rng.integers(len(self.streams))] if self.streams else None
                )
                with stream or nullcontext():
                    self.rng.choice(np.array(operations, object))()
                if self.rng.random() < 0.3:
                    self.compare()
            self.compare()
        except Exception as error:
            error.add_note("\n".join(self.log))
            raise

    def make(self, kind: str) -> None:
        """Makes an optimizer with random groups, in place of the one before."""
        left = [str(name) for name in self.rng.permutation(NAMES)]
        numbers = {name: dict(BASE[kind]) for name in NAMES}
        groups = []
        for _ in range(self.rng.integers(0, 4)):
            count = int(self.rng.integers(1, len(left) + 1)) if left else 0
            mine, left = left[:count], left[count:]
            if not mine:
                break
            pattern = "^(" + "|".join(map(re.escape, mine)) + ")$"
            is_listed = self.rng.random() < 0.5
            own = {}
            for name in BASE[kind]:
                if self.rng.random() < 0.5:
                    # A group of one name has one beta: a state has its power.
                    key = kind + name + (mine[0] if is_listed else pattern)
                    of_name = np.float32(0.2 + zlib.crc32(key.encode()) % 1000 / 1500)
                    is_beta = name.startswith("beta")
                    own[name] = float(of_name) if is_beta else self.rng.uniform(0.01, 0.5)
            given = {
                name: np.float32(value) if name.startswith("beta") else self.form_of(value)
                for name, value in own.items()
            }
            if is_listed:
                listed = (self.variables[name] for name in mine)
                groups.append(ParameterGroup(variables=listed, **given))
            else:
                groups.append(ParameterGroup(pattern, **given))
            for name in mine:
                numbers[name].update(own)
        base = {name: np.float64(value) for name, value in BASE[kind].items()}
        self.optimizers.pop(kind, None)
        self.optimizers[kind] = CLASSES[kind](**base, groups=groups, name=kind)
        self.numbers[kind] = numbers
        self.log.append(f"{kind}: {groups}")

    def form_of(self, value: float) -> Any:
        """The number in one of the forms that a hyperparameter has."""
        exact = np.float64(value)
        device = self.device if self.rng.random() < 0.5 else "cpu"
        forms: list[Callable[[], Any]] = [
            lambda: exact,
            lambda: lambda: exact,
            lambda: np.array(exact),
            lambda: Variable(exact, name="number", trainable=False, device=device),
        ]
        return forms[self.rng.integers(len(forms))]()

    def gradient(self, name: str) -> tuple[Any, np.ndarray, Any]:
        """A gradient, the same as a dense array, and the rows that have one."""
        w = self.model[name]["w"]
        dense = self.rng.normal(size=w.shape)
        choice = self.rng.random()
        if w.ndim == 1 or choice < 0.4:
            return Variable(dense, device=self.device).value(), dense, ...
        height = len(w)
        if choice < 0.7:
            mask = self.rng.random(height) < 0.5
            given = IndexedSlices.from_mask(Variable(dense, device=self.device).value(), mask)
            return given, dense, mask
        indices = self.rng.integers(0, max(height, 1), int(self.rng.integers(4)) if height else 0)
        values = self.rng.normal(size=(len(indices), WIDTH))
        total = np.zeros_like(w)
        np.add.at(total, indices, values)
        return IndexedSlices(values, indices), total, np.unique(indices)

    def step(self) -> None:
        kind = str(self.rng.choice(list(CLASSES)))
        names = [name for name in self.rng.permutation(NAMES) if self.rng.random() < 0.7]
        gradients = {name: self.gradient(name) for name in names or ["bias"]}
        self.log.append(
            f"a step of {kind}: { {name: at for name, (_, _, at) in gradients.items()} }"
        )
        self.optimizers[kind].apply_gradients(
            [(given, self.variables[name]) for name, (given, _, _) in gradients.items()]
        )
        self.steps[kind] += 1
        for name, (_, dense, at) in gradients.items():
            self.step_of_model(kind, name, dense, at)

    def step_of_model(self, kind: str, name: str, g: np.ndarray, at: Any) -> None:
        given, arrays = self.numbers[kind][name], self.model[name]
        w = arrays["w"]
        slots = [arrays.setdefault(f"{kind}/{slot}", np.zeros_like(w)) for slot in SLOTS[kind]]
        if kind == "momentum":
            [a] = slots
            a[at] = given["momentum"] * a[at] + g[at]
            w[at] -= given["learning_rate"] * a[at]
            return
        if kind == "adam_w":
            w[at] -= given["weight_decay"] * w[at]
            if at is not ...:  # TensorFlow's Adam moves all rows
                g = np.where(np.isin(np.arange(len(w)), np.arange(len(w))[at])[:, None], g, 0)
                at = ...
        m, v = slots
        beta1, beta2, t = given["beta1"], given["beta2"], self.steps[kind]
        m[at] += (1 - beta1) * (g[at] - m[at])
        v[at] += (1 - beta2) * (g[at] ** 2 - v[at])
        rate = given["learning_rate"] * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        w[at] -= rate * m[at] / (np.sqrt(v[at]) + given["epsilon"])

    def change_rows(self) -> None:
        name = str(self.rng.choice(TABLES))
        rows, arrays = gpuopt.rows(self.variables[name]), self.model[name]
        height = len(arrays["w"])
        numbers = self.rng.integers(0, height, self.rng.integers(0, height + 1)) if height else []
        numbers = np.asarray(numbers, int)
        change = str(self.rng.choice(["keep", "remove", "append", "append", "copy", "reset"]))
        self.log.append(f"{change} {name} {numbers}")
        if change in ("keep", "remove"):
            getattr(rows, change)(numbers)
            kept = numbers if change == "keep" else np.setdiff1d(np.arange(height), numbers)
            arrays.update({key: array[kept] for key, array in arrays.items()})
        elif change == "reset":
            rows.reset(numbers)
            for key, array in arrays.items():
                array[numbers] = array[numbers] if key == "w" else 0
        else:
            values = self.rng.normal(size=(len(numbers), WIDTH))
            rows.append(values, state_of=numbers if change == "copy" else None)
            for key, array in arrays.items():
                copied = array[numbers] if change == "copy" else np.zeros_like(values)
                arrays[key] = np.concatenate([array, values if key == "w" else copied])

    def set(self) -> None:
        kind = str(self.rng.choice(list(CLASSES)))
        groups = self.optimizers[kind].groups
        if not groups:
            return
        number, value = int(self.rng.integers(len(groups))), float(self.rng.uniform(0.05, 0.5))
        groups[number]["learning_rate"] = self.form_of(value)
        for name, variable in self.variables.items():
            if self.optimizers[kind]._grouping.number_of(variable) == number + 1:
                self.numbers[kind][name]["learning_rate"] = value
        self.log.append(f"the rate of {kind}'s group {number} is {value}")

    def regroup(self) -> None:
        kind = str(self.rng.choice(list(CLASSES)))
        state = self.optimizers[kind].state_dict()
        self.make(kind)
        self.optimizers[kind].load_state_dict(state)

    def save(self) -> None:
        path = self.saver().save(self.folder / "model", len(self.saves))
        self.saves.append((path, copy.deepcopy(self.model), dict(self.steps)))
        self.log.append(f"save {path}")

    def restore(self) -> None:
        """Restores into optimizers of other groups, and tables of the saved height."""
        if not self.saves:
            return
        path, model, steps = self.saves[self.rng.integers(len(self.saves))]
        if any(self.model[name].keys() - arrays.keys() for name, arrays in model.items()):
            return  # slots that the file does not have
        for kind in CLASSES:
            if self.rng.random() < 0.5:
                self.make(kind)
        gc.collect()
        self.log.append(f"restore {path}")
        for name in TABLES:
            table, saved = self.variables[name], len(model[name]["w"])
            height = table.shape[0]
            if height != saved:
                with pytest.raises(gpuopt.CheckpointError, match=re.escape(f'"{name}"')):
                    self.saver([table]).restore(path)
            if height > saved:
                gpuopt.rows(table).keep(range(saved))
            gpuopt.rows(table).append(np.zeros((max(0, saved - height), WIDTH)))
        self.saver().restore(path)
        self.model, self.steps = copy.deepcopy(model), dict(steps)
        self.compare()

    def saver(self, variables: Sequence[Variable] | None = None) -> Saver:
        listed = list(self.variables.values()) if variables is None else variables
        optimizers = list(self.optimizers.values())
        return Saver(listed, optimizers=optimizers, max_to_keep=99)

    def compare(self) -> None:
        for name, arrays in self.model.items():
            variable = self.variables[name]
            for key, expected in arrays.items():
                kind, _, slot = key.partition("/")
                place = self.optimizers[kind].get_slot(variable, slot) if slot else variable
                assert place.shape == expected.shape, (name, key)
                np.testing.assert_allclose(
                    place.numpy(), expected, TOLERANCE, TOLERANCE, err_msg=f"{name} {key}"
                )
