"""What real TensorFlow computed, read from tests/golden, and how to replay it."""

from __future__ import annotations

import functools
import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import textbook

import gpuopt

GOLDEN = Path(__file__).parents[1] / "golden"

# How the golden files' names of optimizers were constructed.
OPTIMIZERS: dict[str, Callable[..., gpuopt.Optimizer]] = {
    "GradientDescent": lambda step, **kw: gpuopt.GradientDescentOptimizer(0.1, **kw),
    "Momentum": lambda step, **kw: gpuopt.MomentumOptimizer(0.1, 0.9, **kw),
    "Adagrad": lambda step, **kw: gpuopt.AdagradOptimizer(0.1, **kw),
    "AdagradDA": lambda step, **kw: gpuopt.AdagradDAOptimizer(0.1, step, **kw),
    "Adadelta": lambda step, **kw: gpuopt.AdadeltaOptimizer(0.1, **kw),
    "RMSProp": lambda step, **kw: gpuopt.RMSPropOptimizer(0.1, **kw),
    "RMSPropCentered": lambda step, **kw: gpuopt.RMSPropOptimizer(0.1, centered=True, **kw),
    "Adam": lambda step, **kw: gpuopt.AdamOptimizer(0.1, **kw),
    "Ftrl": lambda step, **kw: gpuopt.FtrlOptimizer(0.1, **kw),
    "FtrlNamed": lambda step, **kw: gpuopt.FtrlOptimizer(
        0.1, accum_name="acc", linear_name="lin", **kw
    ),
    "ProximalGradientDescent": lambda step, **kw: gpuopt.ProximalGradientDescentOptimizer(
        0.1, **kw
    ),
    "ProximalAdagrad": lambda step, **kw: gpuopt.ProximalAdagradOptimizer(0.1, **kw),
}

# contrib's optimizers of whole matrices, which gpuopt does not have.
NOT_BUILT = {"GGT", "Shampoo"}
# What contrib's tests make of a class.
EXTENDED = {"AdagradWOptimizer": gpuopt.extend_with_decoupled_weight_decay(gpuopt.AdagradOptimizer)}
# Arguments that stand for functions.
DECAYS = {
    "linear_decay_steps": gpuopt.get_linear_decay_fn,
    "cosine_decay_steps": gpuopt.get_cosine_decay_fn,
}

_archives: dict[str, Any] = {}


@functools.cache
def read_text(name: str) -> str:
    return (GOLDEN / name).read_text()


def read_json(name: str) -> Any:
    return json.loads(read_text(name))


@functools.cache
def exceptions(file: str) -> dict[str, int]:
    """Golden keys of one file that are not reproduced, with the number of their departure."""
    return tomllib.loads(read_text("exceptions.toml")).get(file, {})


def optimizer_cases() -> list[dict[str, Any]]:
    contrib = read_json("contrib_index.json")["cases"]
    built = [case for case in contrib if case["optimizer"] not in NOT_BUILT]
    return read_json("index.json")["cases"] + built


def kind_of_case(case: dict[str, Any]) -> tuple[str, str]:
    """Returns the optimizer and the type: a test that runs one in n of its cases has each."""
    return case["optimizer"], case["dtype"]


class GoldenCase:
    """One optimizer, one variable "w", and a gradient for each step."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.dtype = np.dtype(case["dtype"])
        name = Path(case["file"]).name
        if name not in _archives:
            with np.load(GOLDEN / name) as archive:
                _archives[name] = dict(archive)
        prefix = case["id"] + "/"
        self.arrays = {
            key.removeprefix(prefix): array
            for key, array in _archives[name].items()
            if key.startswith(prefix)
        }

    @property
    def optimizer_name(self) -> str:
        return self.case["optimizer"] + "Optimizer"

    @property
    def optimizer_class(self) -> Any:
        return EXTENDED.get(self.optimizer_name) or getattr(gpuopt, self.optimizer_name)

    @property
    def is_sparse(self) -> bool:
        return self.case["mode"] != "dense"

    def gradient(self, step: int) -> Any:
        """The gradient of a step, counted from 0, as it is given to `apply_gradients`."""
        if not self.is_sparse:
            return self.arrays["grads"][step]
        rows = int(self.arrays["nnz"][step])
        indices = self.arrays["indices"][step, :rows]
        indices = indices.astype(self.case.get("index_dtype", "int64"))
        return gpuopt.IndexedSlices(self.arrays["values"][step, :rows], indices)

    def hyperparameters(self) -> dict[str, Any]:
        kwargs = dict(self.case["kwargs"])
        if "hyper_dtype" in self.case:
            hyper = np.dtype(self.case["hyper_dtype"]).type
            kwargs = {key: hyper(value) for key, value in kwargs.items()}
        for key in DECAYS.keys() & kwargs.keys():
            kwargs["sign_decay_fn"] = DECAYS[key](kwargs.pop(key))
        return kwargs

    def make_optimizer(self, global_step: gpuopt.Variable, schedule: list[Any]) -> Any:
        """Makes the optimizer; a learning rate schedule is fed through the list's one element."""
        kwargs = self.hyperparameters()
        if "lr_schedule" in self.arrays:
            kwargs["learning_rate"] = lambda: schedule[0]
        if self.case["optimizer"] == "AdagradDA":
            kwargs["global_step"] = global_step
        return self.optimizer_class(**kwargs)

    def replay(self, device: str = "cpu") -> dict[str, list[Any]]:
        """Runs gpuopt through the case; returns every array of the golden file, row by row."""
        global_step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
        w = gpuopt.Variable(self.arrays["var"][0], name="w", device=device)
        schedule: list[Any] = [None]
        optimizer = self.make_optimizer(global_step, schedule)
        rows: dict[str, list[Any]] = {
            key: []
            for key in self.arrays
            if key in ("var", "global_step") or key.startswith(("slot/", "nonslot/"))
        }
        for step in range(self.case["steps"]):
            if "lr_schedule" in self.arrays:
                schedule[0] = self.arrays["lr_schedule"][step]
            optimizer.apply_gradients([(self.gradient(step), w)], global_step=global_step)
            own = {variable.name: variable for variable in optimizer.variables()}
            for key, values in rows.items():
                kind, _, name = key.partition("/")
                if kind == "slot":
                    values.append(optimizer.get_slot(w, name).numpy())
                elif kind == "nonslot":
                    values.append(own[name].numpy())
                else:
                    values.append((w if key == "var" else global_step).numpy())
        return rows

    def hand_computed(self) -> dict[str, np.ndarray]:
        """The textbook's weight and slots after the last step, in float64."""
        name = snake_case(self.case["optimizer"])
        of_rows = getattr(textbook, f"sparse_{name}", None) if self.is_sparse else None
        function = of_rows or getattr(textbook, name)
        w = self.arrays["var"][0].astype(np.float64)
        parameters = inspect.signature(self.optimizer_class.__init__).parameters
        defaults = {name: p.default for name, p in parameters.items()}
        known = inspect.signature(function).parameters
        given = {**defaults, **self.hyperparameters()}
        kwargs = {
            name: _as_float32(given[name])
            for name in known
            if given.get(name, inspect.Parameter.empty) not in (inspect.Parameter.empty, None)
        }
        steps = range(self.case["steps"])
        if "lr_schedule" in self.arrays:
            raise NotImplementedError("the textbook has constant learning rates")
        if not self.is_sparse:
            history = [(t + 1, self.gradient(t).astype(np.float64)) for t in steps]
            return function(w, history, **kwargs)
        result: dict[str, np.ndarray] = {}
        for row in range(w.shape[0]):
            history = []
            for t in steps:
                slices = self.gradient(t)
                mine = slices.values[slices.indices == row].astype(np.float64)
                if len(mine):
                    history.append((t + 1, mine.sum(axis=0)))
                elif self.optimizer_class.rule_of_other_rows is not None:
                    history.append((t + 1, None))
            for key, value in function(np.array(w[row]), history, **kwargs).items():
                result.setdefault(key, np.zeros_like(w))[row] = value
        return result


def error(got: Any, expected: Any) -> float:
    """max|difference| / (max|reference| + 1e-3); a NaN must be a NaN, an infinity the same."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        return np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return np.inf
    got, expected = got[finite], expected[finite]
    if got.size == 0:
        return 0.0
    difference = np.max(np.abs(got - expected)) / (np.max(np.abs(expected)) + 1e-3)
    return float(np.nan_to_num(difference, nan=np.inf))


def check(file: str, key: str, got: Any, expected: Any, tolerance: float) -> None:
    """Compares, unless the key is listed as a departure, which must then be real."""
    measured = error(got, expected)
    if key in exceptions(file):
        assert measured > tolerance, f"{key} is reproduced: take it off exceptions.toml"
    else:
        assert measured <= tolerance, f"{file} {key}: error {measured:.2e} > {tolerance:.0e}"


def snake_case(optimizer: str) -> str:
    """ "RMSProp" -> "rms_prop": an optimizer's module and textbook function."""
    special = {"RMSProp": "rms_prop", "AdagradDA": "adagrad_da", "LARS": "lars"}
    if optimizer in special:
        return special[optimizer]
    return "".join("_" * (i > 0 and c.isupper()) + c.lower() for i, c in enumerate(optimizer))


def _as_float32(value: Any) -> Any:
    rounded = isinstance(value, float) and not isinstance(value, np.floating)
    return float(np.float32(value)) if rounded else value
