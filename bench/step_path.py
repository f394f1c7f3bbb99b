"""A known step of 1,000 small variables: with one unusual pair, and of a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

import gpuopt
from bench.harness import Offer
from bench.targets import list_targets
from gpuopt.bench.clock import Step
from gpuopt.bench.workloads import Workload

_VARIABLES = 1000
_FLOATS = 64
_WARM_UP = 6
_DENSE = "all dense, the same objects"
_DENSE_AND_ROWS = "all dense, and the rows in a call of their own"
_LAYERS = 500
_LISTED = "apply_gradients, the same pairs"

Pairs = list[Any]


def _make_pairs(what: str, make_step: Callable[[Pairs], Step]) -> Workload:
    """Makes steps of a list with unusual pairs, and of dense ones."""
    dense = [(_make_gradient(), gpuopt.Variable(_make_array())) for _ in range(_VARIABLES)]
    contenders = {"gpuopt": make_step(dense), _DENSE: _step(dense)}
    if make_step is _step_with_rows:
        contenders[_DENSE_AND_ROWS] = _both(_step(dense), _step([_make_rows()]))
    described = f"{_VARIABLES:,} variables of {_FLOATS} floats; {what}"
    return _make_workload(described, _VARIABLES, contenders)


def _make_rows() -> tuple[gpuopt.IndexedSlices, gpuopt.Variable]:
    rows = gpuopt.IndexedSlices(np.ones((3, 8), np.float32), np.array([1, 2, 1]))
    return rows, gpuopt.Variable(np.ones((1000, 8), np.float32))


def _step_with_none(dense: Pairs) -> Step:
    return _step([*dense, (None, gpuopt.Variable(_make_array()))])


def _step_with_rows(dense: Pairs) -> Step:
    return _step([*dense, _make_rows()])


def _step_with_array(dense: Pairs) -> Step:
    return _step([*dense, (_make_gradient(), _make_array())])


def _step_of_arrays(dense: Pairs) -> Step:
    return _step([(_make_gradient(), _make_array()) for _ in dense])


def _step_of_views(dense: Pairs) -> Step:
    optimizer = _make_optimizer()
    flat = np.ones(len(dense) * _FLOATS, np.float32)

    def step() -> None:
        optimizer.apply_gradients(
            [
                (gradient, flat[_FLOATS * i : _FLOATS * (i + 1)])
                for i, (gradient, _) in enumerate(dense)
            ]
        )

    return step


def _step_with_new_gradients(dense: Pairs) -> Step:
    return _step(*([(_make_gradient(), variable) for _, variable in dense] for _ in range(2)))


def _make_tree(what: str, make_leaf: Callable[[Any], Any]) -> Workload:
    """Makes steps of `update` on one tree, and of `apply_gradients` on a list of such leaves."""

    def tree_of(make: Callable[[], Any]) -> Any:
        return {"layers": [{"W": make(), "b": make()} for _ in range(_LAYERS)]}

    params, grads = tree_of(lambda: make_leaf(_make_array())), tree_of(_make_gradient)
    optimizer = _make_optimizer()
    pairs = [(_make_gradient(), make_leaf(_make_array())) for _ in range(2 * _LAYERS)]
    contenders: dict[str, Step] = {
        "gpuopt": lambda: optimizer.update(params, grads),
        _LISTED: _step(pairs),
    }
    described = f"{_LAYERS} layers of W and b of {_FLOATS} floats; {what}"
    return _make_workload(described, 2 * _LAYERS, contenders)


def _make_workload(described: str, num_variables: int, contenders: dict[str, Step]) -> Workload:
    """Warms contenders up, which step variables as described."""
    for contender in contenders.values():
        for _ in range(_WARM_UP):
            contender()
    return Workload(
        f"Momentum on {described}",
        contenders,
        # Gradient, slot and weight are read; slot and weight are written.
        bytes_moved=num_variables * _FLOATS * 4 * 5,
        per="operation",
        units=num_variables,
    )


def _make_optimizer() -> gpuopt.Optimizer:
    return gpuopt.MomentumOptimizer(1e-3, 0.9)


def _step(*lists: list[Any]) -> Step:
    """Makes a step of an optimizer of its own, on one list of pairs after the other."""
    optimizer, turns = _make_optimizer(), cycle(lists)
    return lambda: optimizer.apply_gradients(next(turns))


def _both(first: Step, second: Step) -> Step:
    def step() -> None:
        first()
        second()

    return step


def _make_array() -> np.ndarray[Any, Any]:
    return np.ones(_FLOATS, np.float32)


def _make_gradient() -> np.ndarray[Any, Any]:
    return np.full(_FLOATS, 1e-3, np.float32)


# By name: in words, how steps are made, and the largest ratio to what is timed beside them.
_UNUSUAL: Mapping[str, tuple[str, Callable[[Pairs], Step], dict[str, float]]] = {
    "step_with_one_none": ("one gradient is None", _step_with_none, {_DENSE: 1.3}),
    "step_with_one_indexed_slices": (
        *("one gradient is IndexedSlices", _step_with_rows),
        {_DENSE_AND_ROWS: 1.2},
    ),
    "step_with_one_raw_array": ("one variable is a raw array", _step_with_array, {_DENSE: 1.5}),
    "step_of_raw_arrays": ("all variables are raw arrays", _step_of_arrays, {_DENSE: 1.5}),
    "step_of_new_views": (
        *("all variables are new views in each step", _step_of_views),
        {_DENSE: 8.0},
    ),
    "step_with_new_gradients": (
        *("the gradients are other objects", _step_with_new_gradients),
        {_DENSE: 1.5},
    ),
}
_TREES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "update_of_a_tree_of_variables": ("Variables", gpuopt.Variable),
    "update_of_a_tree_of_arrays": ("raw arrays", np.copy),
}
OFFERS = (
    *(
        Offer(name, partial(_make_pairs, what, make_step), list_targets(name, limits))
        for name, (what, make_step, limits) in _UNUSUAL.items()
    ),
    *(
        Offer(name, partial(_make_tree, *given), list_targets(name, {_LISTED: 1.3}))
        for name, given in _TREES.items()
    ),
)
