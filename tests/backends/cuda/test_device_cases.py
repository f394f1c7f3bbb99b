"""The comparison of GPU steps with numpy's accepts differences by rounding, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import textbook
from device_cases import (
    LAYOUTS,
    MEMORY,
    Rows,
    check_against_numpy,
    check_step,
    dense_case,
    sparse_case,
)
from dtypes import DTYPES_BY_NAME

pytestmark = pytest.mark.internal

EPS = float(np.finfo(np.float32).eps)


class Host:
    """A device that is numpy itself."""

    def put(self, host: np.ndarray) -> np.ndarray:
        return np.array(host)

    def get(self, array: Any) -> np.ndarray:
        return np.array(array)


def step_of_adam() -> tuple[np.ndarray, np.ndarray]:
    """Weights before and after a step, by the textbook in float64."""
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(2, 1000)).astype(np.float32).astype(np.float64)
    after = textbook.adam(w, [(1, g)], learning_rate=0.1)["var"]
    return w.astype(np.float32), after.astype(np.float32)


def test_a_step_within_the_bound_is_accepted() -> None:
    before, after = step_of_adam()
    assert check_step(before, after, after) == 0
    scale = abs(before) + abs(after - before)
    assert check_step(before, after + np.float32(3 * EPS) * scale, after) == 0


def test_an_element_beyond_its_own_update_is_counted() -> None:
    before, after = np.float32([0, 0]), np.float32([1e-3, 1])
    assert check_step(before, np.float32([1e-3 * (1 + 20 * EPS), 1]), after) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda before, after: after * np.float32(1 + 6 * EPS),
        lambda before, after: np.where(np.arange(after.size) == 999, before, after),
        lambda before, after: np.roll(after, 1),
        lambda before, after: np.where(np.arange(after.size) == 0, np.float32(np.nan), after),
        lambda before, after: after.astype(np.float16).astype(np.float32),
        lambda before, after: textbook_with_another_epsilon(),
    ],
    ids=["6 eps", "one left out", "shifted", "nan", "in float16", "another epsilon"],
)
def test_a_wrong_step_is_refused(spoil: Any) -> None:
    before, after = step_of_adam()
    with pytest.raises(AssertionError, match="elements are wrong; at"):
        check_step(before, spoil(before, after), after)


def test_an_element_may_go_the_other_way_only_where_it_may_jump() -> None:
    before, after = np.float32([1, 1]), np.float32([1.1, 0.9])
    other_way = np.float32([0.9, 0.9])
    with pytest.raises(AssertionError, match=r"1 of 2 elements are wrong; at \[0\]"):
        check_step(before, other_way, after)
    assert check_step(before, other_way, after, may_jump=True) == 1
    with pytest.raises(AssertionError, match=r"1 of 2 elements are wrong; at \[0\]"):
        check_step(before, np.float32([0.8, 0.9]), after, may_jump=True)


def textbook_with_another_epsilon() -> np.ndarray:
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(2, 1000)).astype(np.float32).astype(np.float64)
    after = textbook.adam(w, [(1, g)], learning_rate=0.1, epsilon=1e-7)["var"]
    return after.astype(np.float32)


def test_denormals_may_be_flushed_and_nothing_else() -> None:
    before = np.zeros(2, np.float32)
    after = np.float32([1e-40, 1])
    assert check_step(before, np.float32([0, 1]), after) == 0
    with pytest.raises(AssertionError, match="at \\[1\\]"):
        check_step(before, np.float32([1e-40, 0]), after)


def test_layouts_give_variable_and_gradient_one_shape_and_cover_what_kernels_tell_apart() -> None:
    memory = np.zeros(MEMORY, np.float32)
    views = [(layout.variable(memory), layout.gradient(memory)) for layout in LAYOUTS]
    assert all(variable.shape == gradient.shape for variable, gradient in views)
    variables = [variable for variable, _ in views]
    assert {0, 1, 5, 4096, 16387} <= {variable.size for variable in variables}
    for arrays in (variables, [gradient for _, gradient in views]):
        offsets = {(a.ctypes.data - memory.ctypes.data) % 16 for a in arrays}
        assert {0, 4} <= offsets
        assert any(not a.flags.c_contiguous for a in arrays)


@pytest.mark.parametrize("dtype", DTYPES_BY_NAME)
def test_numpy_steps_like_itself(dtype: str) -> None:
    check_against_numpy(Host(), "AdamOptimizer", {}, *dense_case(Host(), dtype))
    check_against_numpy(Host(), "AdamOptimizer", {}, *sparse_case(Host(), dtype))


def test_sparse_values_add_up_exactly_in_every_order() -> None:
    runs = Rows("", 1, 3, np.int32, lambda rng: np.zeros(5000))
    for dtype in DTYPES_BY_NAME:
        [step] = sparse_case(Host(), dtype, [runs], 1)[1]
        values = step.on_host[0].values.astype(np.float32)
        forward = np.add.accumulate(values)[-1]
        backward = np.add.accumulate(values[::-1])[-1]
        assert forward.tolist() == backward.tolist() == values.astype(np.float64).sum(0).tolist()
