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
    check_step(before, after, after, is_exact=True)
    scale = abs(before) + abs(after - before)
    check_step(before, after + np.float32(3 * EPS) * scale, after, is_exact=False)


@pytest.mark.parametrize("other", [np.float32(1) + np.float32(EPS), np.float32(np.nan)])
def test_where_bits_must_be_the_same_the_last_one_counts(other: np.float32) -> None:
    before, after = np.float32([0, 0]), np.float32([1, 2])
    with pytest.raises(AssertionError, match=r"1 of 2 elements are wrong; at \[0\]"):
        check_step(before, np.float32([other, 2]), after, is_exact=True)


def test_where_bits_must_be_the_same_zeros_have_their_signs() -> None:
    with pytest.raises(AssertionError, match=r"1 of 1 elements are wrong"):
        check_step(np.ones(1), np.float64([-0.0]), np.zeros(1), is_exact=True)


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
        check_step(before, spoil(before, after), after, is_exact=False)


def textbook_with_another_epsilon() -> np.ndarray:
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(2, 1000)).astype(np.float32).astype(np.float64)
    after = textbook.adam(w, [(1, g)], learning_rate=0.1, epsilon=1e-7)["var"]
    return after.astype(np.float32)


def test_denormals_may_be_flushed_and_nothing_else() -> None:
    before = np.zeros(2, np.float32)
    after = np.float32([1e-40, 1])
    check_step(before, np.float32([0, 1]), after, is_exact=True)
    with pytest.raises(AssertionError, match="at \\[1\\]"):
        check_step(before, np.float32([1e-40, 0]), after, is_exact=True)


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
