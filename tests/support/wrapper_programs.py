"""Random programs of steps by wrappers in wrappers, and the same by a naive model in numpy.

The optimizer inside is always momentum, of a rule or of hooks: wrappers know no more of it.
"""

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
from gpuopt.variables.unfinished import begun

empty = nullcontext()
SHAPES = {"dense": (3, 4), "table": (6, 2), "vector": (5,)}
CLIP_DIMS = {"dense": [0, 1], "table": [1]}
MAX_NORM, DECAY = 1.3, 0.75
LEARNING_RATE, MOMENTUM = np.float64(0.3), np.float64(0.9)

OPTIMIZERS: dict[str, Callable[..., gpuopt.Optimizer]] = {
    "momentum": lambda **kw: gpuopt.MomentumOptimizer(LEARNING_RATE, MOMENTUM, **kw),
    "hooks": lambda **kw: HookMomentum(**kw),
}
WRAPPERS = ["average", "average before", "clip", "multitask", "users"]


class HookMomentum(gpuopt.Optimizer):
    """Momentum as a user of TensorFlow would write it: one variable after the other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(False, "Momentum", **options)

    def _create_slots(self, var_list: Any) -> None:
        for var in var_list:
            self._zeros_slot(var, "momentum", self._name)

    def _all_slot_names(self) -> list[str]:
        return ["momentum"]

    def _apply_dense(self, grad: Any, var: Any) -> None:
        slot = self.get_slot(var, "momentum")
        slot.assign(slot.value() * MOMENTUM + grad)
        var.assign_sub(LEARNING_RATE * slot.value())

    def _apply_sparse(self, grad: Any, var: Any) -> None:
        slot = self.get_slot(var, "momentum")
        rows = grad.indices
        slot[rows] = slot.value()[rows] * MOMENTUM + grad.values
        var[rows] = var.value()[rows] - LEARNING_RATE * slot.value()[rows]


class UsersWrapper(gpuopt.Optimizer):
    """As users of TensorFlow write them: nothing but calls of the optimizer inside."""

    def __init__(self, opt: gpuopt.Optimizer) -> None:
        super().__init__(False, "Users")
        self._opt = opt

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        return self._opt.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, var: Any, name: str) -> Any:
        return self._opt.get_slot(var, name)

    def check(self) -> None:
        self._opt.check()


class Model:
    """What a program should have computed, in float64."""

    def __init__(self, kind: str, wrappers: list[str], values: dict[str, np.ndarray]) -> None:
        self.kind, self.wrappers = kind, wrappers
        self.values = values
        self.momenta: dict[str, np.ndarray] = {}
        self.averages: list[dict[str, np.ndarray]] = [{} for _ in wrappers]
        self.count = 0

    def step(self, gradients: dict[str, Any], fails: bool = False) -> None:
        """Does a step.

        Args:
            gradients: By name; rows are (values, rows).
            fails: Whether an error comes after the update.
        """
        named = {name: g for name, g in gradients.items() if g is not None}
        for name in named:
            self.momenta.setdefault(name, np.zeros(SHAPES[name]))
        for wrapper, averages in zip(self.wrappers, self.averages, strict=True):
            for name in named if wrapper.startswith("average") else []:
                averages.setdefault(name, self.values[name].copy())
        self._average("average before", named)
        for name, gradient in named.items():
            if "multitask" not in self.wrappers or np.any(_values(gradient)):
                self._update(name, gradient)
        if fails:
            return
        self.count += 1
        for at in reversed(range(len(self.wrappers))):
            if self.wrappers[at] == "average":
                self._average("average", named, at)
            elif self.wrappers[at] == "clip":
                for name in named.keys() & CLIP_DIMS.keys():
                    self._clip(name, named[name])

    def _average(self, kind: str, names: Any, only: int | None = None) -> None:
        for at, wrapper in enumerate(self.wrappers):
            if wrapper == kind and only in (None, at):
                for name in names:
                    old = self.averages[at][name]
                    self.averages[at][name] = old - (1 - DECAY) * (old - self.values[name])

    def _clip(self, name: str, gradient: Any) -> None:
        w, dims = self.values[name], tuple(CLIP_DIMS[name])
        norms = np.sqrt((w**2).sum(axis=dims, keepdims=True))
        clipped = w * np.minimum(1, MAX_NORM / np.maximum(norms, 1e-300))
        if isinstance(gradient, tuple):
            rows = np.unique(gradient[1])
            w[rows] = clipped[rows]
        else:
            w[...] = clipped

    def _update(self, name: str, gradient: Any) -> None:
        w, momentum, rows = self.values[name], self.momenta[name], slice(None)
        g = gradient
        if isinstance(gradient, tuple):
            g, rows = np.zeros_like(w), np.unique(gradient[1])
            np.add.at(g, gradient[1], gradient[0])
        momentum[rows] = momentum[rows] * MOMENTUM + g[rows]
        w[rows] -= LEARNING_RATE * momentum[rows]


class Program:
    """One program, which does the same to gpuopt and to the model, and compares."""

    def __init__(
        self, seed: int, folder: Path, places: str = "cpu", streams: Sequence[Any] = ()
    ) -> None:
        """Makes variables and wrappers.

        Args:
            seed: Of all choices.
            folder: For checkpoints.
            places: The device of all variables; or "mixed": of "dense" the CPU, of others gpu:0.
            streams: Each operation is done on one of these.
        """
        self.rng = np.random.default_rng(seed)
        self.folder, self.streams = folder, streams
        self.device = "gpu:0" if places == "mixed" else places
        of_dense = "cpu" if places == "mixed" else places
        self.places = {name: of_dense if name == "dense" else self.device for name in SHAPES}
        kind = str(self.rng.choice(list(OPTIMIZERS)))
        number = int(self.rng.integers(1, 4))
        # One Multitask: of two, each would leave out the same.
        self.wrappers = [str(each) for each in self.rng.choice(WRAPPERS, number, replace=False)]
        self.skips = bool(self.rng.random() < 0.4)
        start = {name: self.rng.normal(size=shape) for name, shape in SHAPES.items()}
        self.variables = {n: Variable(v, name=n, device=self.places[n]) for n, v in start.items()}
        self.step_counter = Variable(0, name="step", trainable=False, dtype=np.int64)
        self.model = Model(kind, self.wrappers, start)
        self.own = OPTIMIZERS[kind](on_nonfinite="skip" if self.skips else "propagate")
        self.optimizer: Any = self.own
        self.averagers: list[gpuopt.MovingAverageOptimizer | None] = []
        for wrapper in reversed(self.wrappers):
            self.optimizer = self._wrap(wrapper, self.optimizer)
            is_average = wrapper.startswith("average")
            self.averagers.insert(0, self.optimizer if is_average else None)
        self.saves: list[tuple[str, Any, Any, Any]] = []
        self.log = [f"seed {seed}: {kind} in {self.wrappers}, skips: {self.skips}"]

    def run(self, length: int) -> None:
        try:
            for _ in range(length):
                with self.streams[self.rng.integers(len(self.streams))] if self.streams else empty:
                    self.operation()
                self.compare()
        except Exception as error:
            error.add_note("\n".join(self.log))
            raise

    def operation(self) -> None:
        operations = [self.good_step] * 6 + [self.refused_step, self.failing_step, self.assign]
        operations += [self.save, self.restore, self.failing_finish]
        if self.skips:
            operations += [self.skipped_step] * 2
        if self.device != "cpu":
            operations += [self.late_step] * 2
        self.rng.choice(np.array(operations, object))()

    def good_step(self) -> None:
        gradients = self.gradients()
        if all(gradient is None for gradient in gradients.values()):
            with pytest.raises(ValueError, match="No gradients provided"):
                self.apply(gradients)
            return
        self.log.append(f"step {_described(gradients)}")
        self.apply(gradients)
        self.model.step(gradients)

    def skipped_step(self) -> None:
        gradients = self.gradients()
        gradients["vector"] = np.full(5, np.nan)
        self.log.append("a step with NaN")
        self.apply(gradients)

    def refused_step(self) -> None:
        gradients = self.gradients()
        gradients["dense"] = np.zeros((3, 5))
        self.log.append("a step with a gradient of a wrong shape")
        with pytest.raises(ValueError, match='gradient for "dense" has shape'):
            self.apply(gradients)

    def failing_step(self) -> None:
        """An error of the user's own, before anything is written."""

        def fail() -> None:
            raise RuntimeError("of the user's")

        self.log.append("a step whose _prepare fails")
        self.own._prepare = fail  # type: ignore[method-assign]
        gradients = self.gradients()
        gradients["vector"] = np.zeros(5)
        try:
            with pytest.raises(RuntimeError, match="of the user's"):
                self.apply(gradients)
        finally:
            del self.own._prepare

    def failing_finish(self) -> None:
        """An error of the user's own after the update: it says what is missing."""

        def fail(update_ops: Any, name_scope: str) -> None:
            raise RuntimeError("of the user's")

        self.log.append("a step whose _finish fails")
        self.own._finish = fail  # type: ignore[method-assign]
        gradients = self.gradients()
        gradients["vector"] = np.ones(5)
        try:
            with pytest.raises(RuntimeError, match="of the user's") as raised:
                self.apply(gradients)
        finally:
            del self.own._finish
        # The program goes on with what is there; tests of unfinished steps settle them.
        begun.clear()
        self.model.step(gradients, fails=True)
        [note] = raised.value.__notes__
        assert ("moving averages" in note) == any(w.startswith("average") for w in self.wrappers)
        assert ("clipping" in note) == ("clip" in self.wrappers)
        assert '"step" was not counted up' in note, note

    def late_step(self) -> None:
        gradients = self.gradients()
        gradients["table"] = (np.ones((2, 2)), np.array([1, 6]))
        self.log.append(f"a step with a row that the GPU refuses {_described(gradients)}")
        if self.model.kind != "hooks":
            # What is on the CPU is updated nevertheless.
            elsewhere = {n: g for n, g in gradients.items() if self.places[n] != self.device}
            self.model.step(elsewhere)
            self.model.count -= 1
        with pytest.raises(IndexError, match='gradient for "table": row 6'):  # noqa: PT012
            self.apply(gradients, on_device=True)
            self.optimizer.check()

    def assign(self) -> None:
        name = str(self.rng.choice(list(SHAPES)))
        value = self.rng.normal(size=SHAPES[name])
        self.log.append(f"assign {name}")
        self.variables[name].assign(value)
        self.model.values[name] = value

    def save(self) -> None:
        """By a plain Saver, or by the swapping one of one of the wrappers."""
        saver = self.saver()
        path = saver.save(self.folder / "model", global_step=len(self.saves))
        self.log.append(f"save {path} by {type(saver).__name__}")
        self.saves.append((path, saver, copy.deepcopy(self.model), self.made()))

    def restore(self) -> None:
        if not self.saves:
            return
        path, saver, kept, made = self.saves[int(self.rng.integers(len(self.saves)))]
        if made != self.made():
            return  # a Saver of everything wants exactly what there is
        self.log.append(f"restore {path}")
        saver.restore(path)
        self.model = copy.deepcopy(kept)

    def made(self) -> list[set[str]]:
        """Names the variables that have slots, and those that each wrapper has averages of."""
        owners = [[self.own.get_slot(v, "momentum") for v in self.variables.values()]]
        owners += [
            [each.averages.average(v) for v in self.variables.values()]
            for each in self.averagers
            if each is not None
        ]
        return [
            {name for name, made in zip(SHAPES, found, strict=True) if made is not None}
            for found in owners
        ]

    def saver(self) -> gpuopt.Saver:
        swapping = [each for each in self.averagers if each and each.averages._averages]
        if swapping and self.rng.random() < 0.7:
            return swapping[int(self.rng.integers(len(swapping)))].swapping_saver(max_to_keep=99)
        return gpuopt.Saver(max_to_keep=99)

    def gradients(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            kind = self.rng.choice(["dense", "sparse", "none", "zero", "no rows"])
            if kind == "none":
                result[name] = None
            elif kind in ("sparse", "no rows") and name == "table":
                rows = self.rng.integers(0, 6, size=3 if kind == "sparse" else 0)
                values = self.rng.normal(size=(len(rows), 2))
                if self.rng.random() < 0.2:
                    values[:] = 0
                result[name] = (values, rows)
            elif kind == "zero":
                result[name] = np.zeros(shape)
            else:
                result[name] = self.rng.normal(size=shape)
        return result

    def apply(self, gradients: dict[str, Any], on_device: bool = False) -> None:
        pairs = [
            (
                self._given(gradient, name, on_device or self.rng.random() < 0.5),
                self.variables[name],
            )
            for name, gradient in gradients.items()
        ]
        self.optimizer.apply_gradients(pairs, global_step=self.step_counter)

    def _given(self, gradient: Any, name: str, on_device: bool) -> Any:
        place = self._upload if on_device and self.places[name] != "cpu" else np.asarray
        if isinstance(gradient, tuple):
            values, rows = gradient
            return IndexedSlices(place(values), place(rows))
        return None if gradient is None else place(gradient)

    def _upload(self, array: np.ndarray) -> Any:
        return Variable(array, device=self.device).storage

    def _wrap(self, wrapper: str, opt: Any) -> Any:
        if wrapper == "users":
            return UsersWrapper(opt)
        if wrapper == "multitask":
            return gpuopt.MultitaskOptimizerWrapper(opt)
        if wrapper == "clip":
            dims = {self.variables[name]: dims for name, dims in CLIP_DIMS.items()}
            return gpuopt.VariableClippingOptimizer(opt, dims, MAX_NORM)
        return gpuopt.MovingAverageOptimizer(opt, DECAY, sequential_update=wrapper == "average")

    def compare(self) -> None:
        self.optimizer.check()
        model = self.model
        assert int(self.step_counter) == model.count
        for name, variable in self.variables.items():
            _assert_close(variable, model.values[name], name)
            slot = self.optimizer.get_slot(variable, "momentum")
            if name not in model.momenta:
                assert slot is None or not np.any(slot.numpy()), f"momentum of {name}"
            else:
                _assert_close(slot, model.momenta[name], f"momentum of {name}")
            for averager, averages in zip(self.averagers, model.averages, strict=True):
                if averager is not None and name in averages:
                    average = averager.averages.average(variable)
                    _assert_close(average, averages[name], f"average of {name}")


def _values(gradient: Any) -> Any:
    return gradient[0] if isinstance(gradient, tuple) else gradient


def _described(gradients: dict[str, Any]) -> str:
    kinds = {
        name: "none"
        if g is None
        else ("sparse" if isinstance(g, tuple) else "dense") + ("" if np.any(_values(g)) else " 0")
        for name, g in gradients.items()
    }
    return str(kinds)


def _assert_close(got: Any, expected: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12, err_msg=what)
