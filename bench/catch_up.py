"""Rows that catch up with their steps, compared with LazyAdam, with all rows, and with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np

import gpuopt
from bench.harness import Workload
from bench.targets import Target

_RATE = 0.001
_NUM_ROWS = 8_192
# Of the curve; the tallest table still fits into memory several times, as its rows are narrow.
HEIGHTS = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000, "10m": 10_000_000}
_NARROW, _WIDE = 16, 64
_TALLEST_OF_ALL_ROWS = 1_000_000

TARGETS = (
    Target("catch_up_step", "ratio", "LazyAdam", at_most=1.5),
    Target("catch_up_flush", "ratio", "a step of all rows", at_most=1.5),
)


def make_workloads() -> Iterator[Workload]:
    yield _make_step("catch_up_step", 1_000_000, _WIDE)
    yield _make_flush()
    for name, height in HEIGHTS.items():
        yield _make_step(f"catch_up_step_{name}", height, _NARROW)


def _make_step(name: str, height: int, width: int) -> Workload:
    """A step by rows of Zipf's distribution, which lie anywhere in the table."""
    rng = np.random.default_rng(1)
    shares = 1 / np.arange(1, height + 1)
    places = rng.permutation(height)
    drawn = rng.choice(height, 16 * _NUM_ROWS, p=shares / shares.sum())
    rows = np.split(places[drawn], 16)
    values = rng.normal(size=(_NUM_ROWS, width)).astype(np.float32)
    _, table, step = _ours(gpuopt.AdamOptimizer(_RATE, catch_up=True), height, width)
    contenders = {
        "gpuopt": _in_turn(step, values, rows),
        "LazyAdam": _in_turn(
            _ours(gpuopt.LazyAdamOptimizer(_RATE), height, width)[2], values, rows
        ),
    }
    if height <= _TALLEST_OF_ALL_ROWS:
        all_rows = _ours(gpuopt.AdamOptimizer(_RATE), height, width)[2]
        contenders["all rows"] = _in_turn(all_rows, values, rows)
    if find_spec("torch") is not None:
        contenders["torch SparseAdam"] = _in_turn(_torchs(height, width), values, rows)
    contenders["gpuopt"]()
    catch_up: Any = table.identity.behind._catch_up  # type: ignore[union-attr]
    beside = [each for each in (catch_up.last, catch_up.steps, catch_up.sums) if each is not None]
    return Workload(
        name,
        f"Adam, {_NUM_ROWS:,} rows by Zipf's law of {height:,} x {width}, other rows catching up",
        None,
        contenders,
        peak_extra_bytes={"catching up": sum(each.nbytes for each in beside)},
    )


def _make_flush(height: int = 1_000_000, width: int = _WIDE) -> Workload:
    """Brings a table up to date whose rows were named in different steps; some have a tiny `v`."""
    rng = np.random.default_rng(2)
    optimizer, _, step = _ours(gpuopt.AdamOptimizer(_RATE, catch_up=True), height, width)
    all_rows = _ours(gpuopt.AdamOptimizer(_RATE), height, width)[2]
    parts = np.array_split(rng.permutation(height), 8)
    values = rng.normal(size=(len(parts[0]), width)).astype(np.float32)
    values[::100] *= 1e-12
    one = np.zeros(1, np.int64)

    def fall_behind() -> None:
        for part in parts:
            step(values[: len(part)], part)

    fall_behind()
    return Workload(
        "catch_up_flush",
        f"{height:,} x {width}, an eighth named in each of the last 8 steps, brought up to date",
        2 * 3 * 4 * height * width,
        {
            "gpuopt": optimizer.flush,
            "a step of all rows": lambda: all_rows(values[:1], one),
        },
        settle=fall_behind,
    )


def _ours(
    optimizer: Any, height: int, width: int
) -> tuple[Any, gpuopt.Variable, Callable[[np.ndarray, np.ndarray], None]]:
    table = gpuopt.Variable(np.zeros((height, width), np.float32), name="table")

    def step(values: np.ndarray, rows: np.ndarray) -> None:
        optimizer.apply_gradients([(gpuopt.IndexedSlices(values, rows), table)])

    return optimizer, table, step


def _torchs(height: int, width: int) -> Callable[[np.ndarray, np.ndarray], None]:
    import torch

    table = torch.nn.Parameter(torch.zeros(height, width))
    optimizer = torch.optim.SparseAdam([table], lr=_RATE)

    def step(values: np.ndarray, rows: np.ndarray) -> None:
        indices = torch.from_numpy(rows)[None]
        table.grad = torch.sparse_coo_tensor(
            indices, torch.from_numpy(values), table.shape, check_invariants=False
        )
        optimizer.step()

    return step


def _in_turn(
    step: Callable[[np.ndarray, np.ndarray], None], values: np.ndarray, rows: list[np.ndarray]
) -> Callable[[], None]:
    following = cycle(rows)
    return lambda: step(values, next(following))
