"""Warnings of calls that train wrongly, and are no errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt

pytestmark = pytest.mark.contract

ones = np.ones(3, np.float32)


def one_call_each(optimizer: gpuopt.Optimizer, num_calls: int, as_variables: bool) -> list[Any]:
    kept = [gpuopt.Variable(ones) if as_variables else ones.copy() for _ in range(num_calls)]
    for each in kept:
        optimizer.apply_gradients([(ones, each)])
    return kept


def new_arrays(optimizer: gpuopt.Optimizer, num_calls: int, num_arrays: int) -> list[Any]:
    arrays = kept = [ones.copy() for _ in range(num_arrays)]
    for _ in range(num_calls):
        optimizer.apply_gradients([(ones, each) for each in arrays])
        kept, arrays = arrays, [each.copy() for each in arrays]
    return kept


@pytest.mark.parametrize("as_variables", [False, True])
def test_one_call_for_each_parameter_is_noticed_once(as_variables: bool) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    kept = one_call_each(optimizer, 2, as_variables)
    with pytest.warns(UserWarning, match="three calls in a row.*AdamOptimizer") as caught:
        kept += one_call_each(optimizer, 4, as_variables)
    assert len(caught) == 1
    for each in kept:
        optimizer.apply_gradients([(ones, each)])


def test_one_call_for_each_layer_is_noticed_where_it_is_made() -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    layers = [{"W": np.ones((3, size), np.float32), "b": ones.copy()} for size in (1, 2, 3)]
    for number in range(2):
        optimizer.update(layers[number], layers[number], f"layer{number}")
    with pytest.warns(UserWarning, match="each parameter or layer.*AdamOptimizer") as caught:
        optimizer.update(layers[2], layers[2], "layer2")
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("num_arrays", [1, 3])
def test_new_arrays_in_the_place_of_old_ones_are_noticed_once(num_arrays: int) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    new_arrays(optimizer, 3, num_arrays)
    optimizer = gpuopt.AdamOptimizer(0.1)
    with pytest.warns(UserWarning, match="all arrays were new.*AdamOptimizer") as caught:
        new_arrays(optimizer, 8, num_arrays)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "train",
    [
        lambda: one_call_each(gpuopt.MomentumOptimizer(0.1, 0.9), 6, False),
        lambda: one_call_each(gpuopt.MomentumOptimizer(0.1, 0.9), 6, True),
        lambda: [one_call_each(gpuopt.AdamOptimizer(0.1), 1, True) for _ in range(6)],
        lambda: new_arrays_in_between(gpuopt.AdamOptimizer(0.1)),
        lambda: one_model_after_the_other(gpuopt.AdamOptimizer(0.1)),
        lambda: views(gpuopt.AdamOptimizer(0.1)),
        lambda: skipped_steps(gpuopt.AdamOptimizer(0.1, clip_norm=1.0, on_nonfinite="skip")),
    ],
)
def test_calls_that_are_right_are_not_noticed(train: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train()


def new_arrays_in_between(optimizer: gpuopt.Optimizer) -> None:
    """Unfreezes a variable now and then."""
    kept = []
    for _ in range(4):
        kept.append(ones.copy())
        for _ in range(3):
            optimizer.apply_gradients([(ones, each) for each in kept])


def one_model_after_the_other(optimizer: gpuopt.Optimizer) -> None:
    for _ in range(6):
        model = [ones.copy(), ones.copy()]
        for _ in range(3):
            optimizer.apply_gradients([(ones, each) for each in model])


def skipped_steps(optimizer: gpuopt.Optimizer) -> None:
    w = ones.copy()
    for _ in range(6):
        optimizer.apply_gradients([(ones * np.inf, w)])


def views(optimizer: gpuopt.Optimizer) -> None:
    flat = np.ones(6, np.float32)
    for _ in range(8):
        optimizer.apply_gradients([(ones, flat[:3]), (ones, flat[3:])])
