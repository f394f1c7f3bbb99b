"""Which arrays share memory with what a plan writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends.cpu.memory import WrittenMemory


class Lender:
    """Lends an array's memory without letting numpy know the array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = dict(array.__array_interface__)


def of_torch(array: np.ndarray) -> np.ndarray:
    torch: Any = pytest.importorskip("torch")
    shared: np.ndarray = torch.from_numpy(array).numpy()
    return shared


def another_array_on(array: np.ndarray, way: str) -> np.ndarray:
    if way == "buffer":
        return np.frombuffer(array.data, array.dtype).reshape(array.shape)
    if way == "interface":
        return np.asarray(Lender(array))
    return of_torch(array)


WAYS = ["buffer", "interface", pytest.param("torch", marks=pytest.mark.torch)]


@pytest.mark.parametrize("way", WAYS)
def test_an_array_that_owns_its_memory_overlaps_what_reached_it_by_another_way(way: str) -> None:
    owner, apart = np.ones(6, np.float32), np.ones(6, np.float32)
    written = WrittenMemory([another_array_on(owner, way)[2:4], np.zeros(3)])
    assert written.overlaps(owner)
    assert written.overlaps(owner[3:])
    assert not written.overlaps(owner[:2])
    assert not written.overlaps(owner[4:])
    assert not written.overlaps(apart)
    assert not written.overlaps(apart[1:])
    assert not written.overlaps(np.zeros(0))


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_that_another_update_writes_are_read_first(way: str) -> None:
    gradient = np.ones((4, 2), np.float32)
    table = Variable(another_array_on(gradient, way), copy=False, name="table")
    w = Variable(np.zeros((4, 2), np.float32), name="w")
    rows = IndexedSlices(np.full((2, 2), 10, np.float32), [0, 1])
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
        [(rows, table), (IndexedSlices(gradient, np.arange(4)), w)]
    )
    assert (w.numpy() == -1).all()
    assert gradient.tolist() == [[-9, -9]] * 2 + [[1, 1]] * 2


@pytest.mark.parametrize("way", WAYS)
def test_large_dense_gradients_that_the_step_writes_are_read_first(way: str) -> None:
    size = 200_000
    gradient = np.ones(2 * size, np.float32)
    a = Variable(another_array_on(gradient, way), copy=False, name="a")
    b = Variable(np.zeros(2 * size, np.float32), name="b")
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
        [(np.full(2 * size, 10, np.float32), a), (gradient, b)]
    )
    assert (b.numpy() == -1).all()
