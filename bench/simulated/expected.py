"""What a step must leave in memory, from the formulas in numpy's float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.simulated.tasks import Arrays, Optimizer

Array = np.ndarray[Any, Any]
# How far a result may be off, in units of float32's rounding: a row's sum alone has a rounding for
# each piece that follows on another.
_ROUNDINGS = 64


def expect(optimizer: Optimizer, given: Mapping[str, Array], step: int) -> Arrays:
    """Returns each variable and slot after a step, float64.

    Args:
        optimizer: Whose step it is.
        given: What was there before; see `recording.main`.
        step: Its number, from 1.
    """
    expected: Arrays = {}
    # As everywhere in float32's optimizers: 1 - beta2 would differ in the fifth digit.
    arguments = {name: float(np.float32(value)) for name, value in optimizer.arguments.items()}
    for i in range(sum(name.startswith("table") for name in given)):
        names = [f"table{i}", *(f"{slot}{i}" for slot in optimizer.slots)]
        arrays = [given[name].astype(np.float64) for name in names]
        grad = given[f"grad{i}"].astype(np.float64)
        touched: Any = slice(None)
        if f"rows{i}" in given:
            sums = np.zeros(arrays[0].shape)
            np.add.at(sums, given[f"rows{i}"], grad)
            grad = sums
            if optimizer.name != "AdamOptimizer":  # whose moments decay in every row
                touched = np.unique(given[f"rows{i}"])
        update = _UPDATES[optimizer.name]
        after = update(*(array[touched] for array in (*arrays, grad)), step, **arguments)
        for name, array, values in zip(names, arrays, after, strict=True):
            array[touched] = values
            expected[name] = array
    return expected


def largest_error(got: Array, expected: Array, before: Array) -> float:
    """Returns the largest error as a share of what is allowed: above 1, the result is wrong."""
    limits = np.finfo(got.dtype)
    scale = np.maximum(np.abs(expected), np.abs(before.astype(np.float64)))
    rounding = np.maximum(scale * limits.eps, limits.smallest_subnormal) / 2
    # Computed in float32, then rounded once.
    rounding += scale * np.finfo(np.float32).eps / 2 * _ROUNDINGS
    return float(np.max(np.abs(got.astype(np.float64) - expected) / rounding, initial=0))


def _adam(
    var: Array,
    m: Array,
    v: Array,
    grad: Array,
    step: int,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> tuple[Array, ...]:
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    step_size = learning_rate * np.sqrt(1 - _power(beta2, step)) / (1 - _power(beta1, step))
    return var - step_size * m / (np.sqrt(v) + epsilon), m, v


def _power(beta: float, step: int) -> float:
    """Returns a power as TensorFlow keeps it, by a product of float32 for each step."""
    power = np.float32(beta)
    for _ in range(step - 1):
        power *= np.float32(beta)
    return float(power)


def _momentum(
    var: Array, accumulated: Array, grad: Array, step: int, *, learning_rate: float, momentum: float
) -> tuple[Array, ...]:
    accumulated = momentum * accumulated + grad
    return var - learning_rate * accumulated, accumulated


def _adagrad(
    var: Array, accumulator: Array, grad: Array, step: int, *, learning_rate: float
) -> tuple[Array, ...]:
    accumulator = accumulator + grad**2
    return var - learning_rate * grad / np.sqrt(accumulator), accumulator


_UPDATES: Mapping[str, Callable[..., tuple[Array, ...]]] = {
    "AdamOptimizer": _adam,
    "LazyAdamOptimizer": _adam,
    "MomentumOptimizer": _momentum,
    "AdagradOptimizer": _adagrad,
}
