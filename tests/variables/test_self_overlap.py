"""Arrays that overlap themselves cannot be variables."""

from __future__ import annotations

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable
from gpuopt.variables.identity import refuse_self_overlap
from gpuopt.variables.variable import as_variable

x = np.zeros(24, np.float32)
as_strided = np.lib.stride_tricks.as_strided
OVERLAPPING = {
    "a row that is every row": as_strided(x, (4, 3), (0, 4)),
    "one element": as_strided(x, (3,), (0,)),
    "a sliding window": np.lib.stride_tricks.sliding_window_view(x, 3, writeable=True),
    "a sliding window backwards": np.lib.stride_tricks.sliding_window_view(x, 3, writeable=True)[
        ::-1, ::-1
    ],
    "half an element": as_strided(x, (4,), (2,)),
    "two steps that meet once": as_strided(x, (4, 3), (8, 12)),
    "a tall one": as_strided(x, (10**6, 10**6), (0, 0)),
}
APART = {
    "contiguous": x.reshape(4, 6),
    "Fortran": x.reshape(4, 6).T,
    "strided": x[::3],
    "backwards": x.reshape(4, 6)[::-1, ::-2],
    "permuted": x.reshape(2, 3, 4).transpose(1, 2, 0)[:, 1:],
    "a broadcast axis of length 1": as_strided(x, (4, 1), (4, 0)),
    "empty": as_strided(x, (4, 0), (0, 0)),
    "interleaved steps": as_strided(x, (3, 2), (8, 12)),
    "scalar": x[3:4].reshape(()),
}


@pytest.mark.parametrize("form", OVERLAPPING)
def test_an_array_that_overlaps_itself_is_no_variable(form: str) -> None:
    overlapping = OVERLAPPING[form]
    with pytest.raises(ValueError, match="several elements on the same memory"):
        as_variable(overlapping)
    with pytest.raises(ValueError, match=r'"w": the array .* several elements on the same memory'):
        Variable(overlapping, name="w", copy=False)
    if overlapping.nbytes < 1000:
        assert Variable(overlapping, name="w").shape == overlapping.shape
        gradient = np.ones(overlapping.shape, np.float32)
        with pytest.raises(ValueError, match=r"grads_and_vars\[0\]: the array .* same memory"):
            gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(gradient, overlapping)])
    assert not x.any()


@pytest.mark.parametrize("form", APART)
def test_an_array_whose_elements_are_apart_is_a_variable(form: str) -> None:
    apart = APART[form].copy() if form == "contiguous" else APART[form]
    assert as_variable(apart).shape == apart.shape
    assert Variable(apart, copy=False).shape == apart.shape


def test_overlap_is_found_as_by_counting() -> None:
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(2000):
        shape = tuple(rng.integers(1, 5, rng.integers(1, 4)))
        strides = tuple(int(s) for s in rng.integers(-6, 7, len(shape)) * 2)
        places = sum(
            (np.arange(n) * s).reshape([-1] + [1] * (len(shape) - i - 1))
            for i, (n, s) in enumerate(zip(shape, strides, strict=True))
        )
        places = np.sort(np.broadcast_to(places, shape), axis=None)
        overlaps = bool((np.diff(places) < 4).any())
        memory = np.zeros(200, np.float32)
        view = as_strided(memory[100:], shape, strides)
        try:
            refuse_self_overlap(view)
            assert not overlaps
        except ValueError:
            assert overlaps
            found += 1
    assert 200 < found < 1800
