"""apply_gradients with 10,000 malformed inputs: a documented exception, and nothing changed."""

from __future__ import annotations

import array
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dtypes import DTYPES
from every_optimizer import CONFIGURATIONS, make

from gpuopt import DeviceUnavailableError, IndexedSlices, Variable

pytestmark = pytest.mark.contract

CASES = 10_000
# What the docstring of apply_gradients promises, and of IndexedSlices where the input is one.
DOCUMENTED = (ValueError, TypeError, IndexError, RuntimeError, DeviceUnavailableError)
OTHER_DTYPES = [*DTYPES, bool, np.int8, np.int64, np.uint16, np.complex64, np.complex128, object]


class OnGpu:
    """An array that claims to be on a GPU that does not exist."""

    dtype, shape = np.dtype(np.float32), (4, 3)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Integers:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.ones((4, 3), np.int64)


class OnSomethingElse(OnGpu):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 99, 0


class Victim:
    """An optimizer with variables of several kinds, which no malformed call may change."""

    def __init__(self, number: int) -> None:
        _, name, arguments = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        rng = np.random.default_rng(number)
        self.optimizer = make(name, arguments)
        self.variables = [
            Variable(np.asarray(rng.normal(size=shape)).astype(dtype), name=f"v{i}")
            for i, (shape, dtype) in enumerate(
                zip([(4, 3), (5,), (2, 2, 2), ()], rng.permutation(DTYPES), strict=True)
            )
        ]
        self.buffer = np.asarray(rng.normal(size=20))
        self.integers = Variable(np.arange(3), name="integers")
        self.bound = Variable(np.ones((3, 2), np.float32), name="bound", constraint=np.abs)
        self.step = Variable(0, name="step", trainable=False, dtype=np.int64)
        self.optimizer.apply_gradients(self.fine())

    def fine(self) -> list[Any]:
        return [(np.ones(v.shape, v.dtype), v) for v in self.variables]

    def bytes(self) -> list[bytes]:
        arrays = [v.numpy() for v in (*self.variables, self.integers, self.bound, self.step)]
        own = [v.numpy() for v in self.optimizer.variables()]
        return [array.tobytes() for array in (*arrays, self.buffer, *own)]


def of_wrong_shape(v: Variable, choose: random.Random) -> Any:
    shape = tuple(choose.randrange(5) for _ in range(choose.randrange(4)))
    return np.ones(shape if shape != v.shape else (*v.shape, 2), v.dtype)


def of_wrong_dtype(v: Variable, choose: random.Random) -> Any:
    dtype = choose.choice([d for d in OTHER_DTYPES if np.dtype(d) != v.dtype])
    return np.ones(v.shape, dtype)


def not_a_gradient(v: Variable, choose: random.Random) -> Any:
    return choose.choice(
        [
            "text",
            b"bytes",
            object(),
            {},
            {1: 2},
            {1.0},
            print,
            type,
            [[1.0], [2.0, 3.0]],
            ["a", "b"],
            [None],
            1j,
            Ellipsis,
            range,
            np.datetime64("2020-01-01"),
            np.zeros(v.shape, "datetime64[s]"),
            np.zeros(v.shape, [("a", "f4")]),
            np.full(v.shape, "x"),
            np.full(v.shape, None),
            np.ma.masked_array(np.ones(v.shape, v.dtype), mask=True),
            OnGpu(),
            OnSomethingElse(),
            Integers(),
            array.array("i", [1, 2, 3]),
            (1.0 for _ in range(3)),
            [[[[[1.0]]]]] if v.ndim != 5 else None,
            float("nan") if v.ndim else "nan",
        ]
    )


def rows(v: Variable, choose: random.Random) -> Any:
    """IndexedSlices that are malformed, or do not fit."""
    height, width = v.shape[0] if v.ndim else 4, v.shape[1:]
    count = choose.randrange(1, 4)
    good = np.array([choose.randrange(height) for _ in range(count)])
    bad = good.copy()
    bad[choose.randrange(count)] = choose.choice([-1, height, height + 7, -(2**62), 2**62])
    values = np.ones((count, *width), v.dtype)
    other = choose.choice([d for d in OTHER_DTYPES if np.dtype(d) != v.dtype])
    make_slices: list[Callable[[], Any]] = [
        lambda: IndexedSlices(values, bad),
        lambda: IndexedSlices(np.ones((count, *width, 2), v.dtype), good),
        lambda: IndexedSlices(np.ones((count, 9), v.dtype), good),
        lambda: IndexedSlices(values.astype(other), good),
        lambda: IndexedSlices(values, good, dense_shape=(height + 1, *width)),
        lambda: IndexedSlices(values, good, dense_shape=(-1, *width)),
        lambda: IndexedSlices(values, good.astype(np.float32)),
        lambda: IndexedSlices(values, good[None]),
        lambda: IndexedSlices(values[:-1], good),
        lambda: IndexedSlices(1.0, good),
        lambda: IndexedSlices(values, ["a"] * count),
        lambda: IndexedSlices("text", good),
        lambda: IndexedSlices(np.ma.masked_array(values), good),
        lambda: IndexedSlices(values, np.ma.masked_array(good)),
    ]
    return choose.choice(make_slices)()


def bad_pair(victim: Victim, choose: random.Random) -> Any:
    v = choose.choice(victim.variables)
    gradient = np.ones(v.shape, v.dtype)
    read_only = np.ones(v.shape, v.dtype)
    read_only.flags.writeable = False
    kind = choose.randrange(14)
    if kind == 0:
        return of_wrong_shape(v, choose), v
    if kind == 1:
        return of_wrong_dtype(v, choose), v
    if kind in (2, 3):
        return not_a_gradient(v, choose), v
    if kind in (4, 5):
        return rows(v, choose), v
    if kind == 6:
        return gradient, choose.choice([None, "v", 1.0, [1.0], object(), read_only, OnGpu(), {}])
    if kind == 7:
        return np.ones(3, np.int64), victim.integers
    if kind == 8:
        return IndexedSlices(np.ones((1, 2), np.float32), [0]), victim.bound
    if kind == 9:
        return choose.choice(
            [(), (gradient,), (gradient, v, 1), None, 5, "a", np.float64(1), gradient[None]]
        )
    if kind == 10:
        masked = np.ma.masked_array(np.ones(3), mask=[True, False, False])
        return np.ones(3), masked
    if kind == 11:
        return v, choose.choice([gradient, None, IndexedSlices(np.ones((1, 3)), [0])])
    if kind == 12:
        window = np.lib.stride_tricks.sliding_window_view(victim.buffer, 4, writeable=True)
        return np.ones(window.shape), window
    return gradient.tolist(), victim.integers


def malformed_call(victim: Victim, choose: random.Random) -> None:
    fine = victim.fine()
    choose.shuffle(fine)
    fine = fine[: choose.randrange(len(fine) + 1)]
    kind = choose.randrange(10)
    if kind < 6:
        pairs = [*fine, bad_pair(victim, choose)]
        choose.shuffle(pairs)
        given: Any = choose.choice([pairs, tuple(pairs), iter(pairs)])
        victim.optimizer.apply_gradients(given, global_step=choose.choice([None, victim.step]))
    elif kind == 6:
        step = choose.choice([1, "step", np.zeros(2, np.int64), 1j, [0], object(), np.int64(3)])
        victim.optimizer.apply_gradients(victim.fine(), global_step=step)
    elif kind == 7:
        given = choose.choice([None, 5, [], (), iter(()), [(None, v) for v in victim.variables]])
        victim.optimizer.apply_gradients(given, global_step=victim.step)
    elif kind == 8:
        pairs = [*fine, *victim.fine()[:1] * 2]
        choose.shuffle(pairs)
        victim.optimizer.apply_gradients(pairs, global_step=victim.step)
    else:
        start, other = choose.randrange(10), choose.randrange(10)
        views = [victim.buffer[start : start + 10], victim.buffer[other : other + 10]]
        pairs = [*fine, *((np.ones(10), view) for view in views)]
        victim.optimizer.apply_gradients(pairs, global_step=victim.step)


@pytest.mark.filterwarnings("ignore")  # numpy's own, of what is no array
def test_malformed_input_is_refused_and_changes_nothing() -> None:
    choose = random.Random(6)
    raised: Counter[str] = Counter()
    for number in range(len(CONFIGURATIONS)):
        victim = Victim(number)
        for case in range(CASES // len(CONFIGURATIONS) + 1):
            before = victim.bytes()
            with pytest.raises(DOCUMENTED) as error:
                malformed_call(victim, choose)
            assert type(error.value).__module__ in ("builtins", "gpuopt.errors"), error.value
            assert str(error.value), (number, case)
            assert victim.bytes() == before, (number, case, error.value)
            raised[type(error.value).__name__] += 1
    assert raised.total() >= CASES
    assert set(raised) == {e.__name__ for e in DOCUMENTED}
