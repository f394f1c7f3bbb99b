"""Rows that catch up with their steps, compared with LazyAdam, with all rows, and with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np

import gpuopt
from bench.harness import Offer
from bench.targets import list_targets
from gpuopt.bench.clock import Step
from gpuopt.bench.peers import make_torch_step
from gpuopt.bench.workloads import Workload

# Of the curve: as many at each height. As many draws would name more rows of a taller table.
NUM_DIFFERENT = 4_096
# Of the curve; the tallest table still fits into memory several times, as its rows are narrow.
HEIGHTS = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000, "10m": 10_000_000}
_RATE = 0.001
_NUM_ROWS = 8_192
_NARROW, _WIDE = 16, 64
_TALLEST_OF_ALL_ROWS = 1_000_000
_NUM_BATCHES = 16
_ALL_ROWS = "a step of all rows"
# Of the training.
_STEPS, _BATCH = 600, 64
_WORDS, _VECTOR = 2_000, 8


def _make_step(height: int, width: int, num_different: int | None = None) -> Workload:
    """A step by rows of Zipf's distribution, which lie anywhere in the table.

    Args:
        height: How many rows the table has.
        width: How many columns.
        num_different: How many different rows a step names; None for what chance brings.
    """
    values, rows = _make_batches(height, width, num_different)
    _, table, step = _ours(gpuopt.AdamOptimizer(_RATE, catch_up=True), height, width)
    contenders: dict[str, Step] = {
        "gpuopt": _in_turn(step, values, rows),
        "LazyAdam": _in_turn(
            _ours(gpuopt.LazyAdamOptimizer(_RATE), height, width)[2], values, rows
        ),
    }
    if height <= _TALLEST_OF_ALL_ROWS:
        all_rows = _ours(gpuopt.AdamOptimizer(_RATE), height, width)[2]
        contenders["all rows"] = _in_turn(all_rows, values, rows)
    if find_spec("torch") is not None:
        gradients = [[gpuopt.IndexedSlices(values, each)] for each in rows]
        torchs = make_torch_step(_sparse_adam, [np.zeros((height, width), np.float32)], gradients)
        for _ in rows:
            torchs()
        contenders["torch SparseAdam"] = torchs
    catch_up: Any = table.identity.behind._catch_up  # type: ignore[union-attr]
    beside = [each for each in (catch_up.last, catch_up.steps, catch_up.sums) if each is not None]
    of_them = "" if num_different is None else f", {num_different:,} different ones,"
    return Workload(
        f"Adam, {_NUM_ROWS:,} rows by Zipf's law{of_them} of {height:,} x {width}, other rows "
        "catching up",
        contenders,
        # Beside Adam's slots.
        peak_extra_bytes={"gpuopt": sum(each.nbytes for each in beside)},
    )


def _make_batches(
    height: int, width: int, num_different: int | None
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns gradients, and the rows of each batch that they are for."""
    rng = np.random.default_rng(1)
    ranks = [_draw(rng, height, num_different) for _ in range(_NUM_BATCHES)]
    values = rng.normal(size=(_NUM_ROWS, width)).astype(np.float32)
    return values, list(rng.permutation(height)[ranks])


def _draw(rng: np.random.Generator, height: int, num_different: int | None) -> np.ndarray:
    """Draws ranks by Zipf's law, from 0 on.

    If the number of different ones is given, these are drawn without any that was drawn before, and
    then some of them again.
    """
    if num_different is None:
        shares = 1 / np.arange(1, height + 1)
        return rng.choice(height, _NUM_ROWS, p=shares / shares.sum())
    # Of clocks that ring by Zipf's law, the first to ring are such draws.
    first_rings = rng.exponential(np.arange(1, height + 1))
    different = np.argpartition(first_rings, num_different)[:num_different]
    shares = 1 / (1 + different)
    again = rng.choice(different, _NUM_ROWS - num_different, p=shares / shares.sum())
    return rng.permutation(np.concatenate([different, again]))


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
        f"{height:,} x {width}, an eighth named in each of the last 8 steps, brought up to date",
        {
            "gpuopt": optimizer.flush,
            _ALL_ROWS: lambda: all_rows(values[:1], one),
        },
        2 * 3 * 4 * height * width,
        settle=fall_behind,
    )


def _ours(
    optimizer: Any, height: int, width: int
) -> tuple[Any, gpuopt.Variable, Callable[[np.ndarray, np.ndarray], None]]:
    table = gpuopt.Variable(np.zeros((height, width), np.float32), name="table")

    def step(values: np.ndarray, rows: np.ndarray) -> None:
        optimizer.apply_gradients([(gpuopt.IndexedSlices(values, rows), table)])

    return optimizer, table, step


def _sparse_adam(torch: Any, parameters: Any) -> Any:
    return torch.optim.SparseAdam(parameters, lr=_RATE)


def _in_turn(
    step: Callable[[np.ndarray, np.ndarray], None], values: np.ndarray, rows: list[np.ndarray]
) -> Callable[[], None]:
    """Returns a function that steps by one batch after the other; each was stepped by before."""
    for each in rows:
        step(values, each)
    following = cycle(rows)
    return lambda: step(values, next(following))


def _offer_step(name: str, height: int, width: int, limit: float, *given: Any) -> Offer:
    make = partial(_make_step, height, width, *given)
    return Offer(name, make, list_targets(name, {"LazyAdam": limit}))


OFFERS = (
    _offer_step("catch_up_step", 10**6, _WIDE, 1.5),
    Offer("catch_up_flush", _make_flush, list_targets("catch_up_flush", {_ALL_ROWS: 1.5})),
    # Of narrow rows, what a step does whatever it names is a larger part.
    *(
        _offer_step(f"catch_up_step_{key}", height, _NARROW, 2.0, NUM_DIFFERENT)
        for key, height in HEIGHTS.items()
    ),
)


def train_apart() -> dict[str, np.ndarray]:
    """Returns, by steps, how far tables are from where all rows are moved in each step."""
    ways: dict[str, Any] = {
        "all rows": gpuopt.AdamOptimizer(0.01),
        "catch_up=True": gpuopt.AdamOptimizer(0.01, catch_up=True),
        "LazyAdam": gpuopt.LazyAdamOptimizer(0.01),
    }
    tables = {name: _train(optimizer) for name, optimizer in ways.items()}
    exact = tables.pop("all rows")
    moved = np.array([np.linalg.norm(each - exact[0]) for each in exact[1:]])
    every = np.arange(1, len(exact)) * _STEPS // (len(exact) - 1)
    curves = {}
    for name, seen in tables.items():
        apart = [np.linalg.norm(one - all_) for one, all_ in zip(seen[1:], exact[1:], strict=True)]
        curves[name] = np.column_stack([every, np.array(apart) / moved])
    return curves


def _train(optimizer: Any) -> Sequence[np.ndarray]:
    """Learns vectors of words from pairs of them by Zipf's law; returns the table now and then."""
    rng = np.random.default_rng(3)
    table = gpuopt.Variable(rng.normal(scale=0.1, size=(_WORDS, _VECTOR)), dtype=np.float32)
    meaning = rng.normal(size=(_WORDS, _VECTOR)).astype(np.float32)
    shares = 1 / np.arange(1, _WORDS + 1)
    seen = [table.numpy()]
    for step in range(1, _STEPS + 1):
        pairs = rng.choice(_WORDS, (_BATCH, 2), p=shares / shares.sum())
        wanted = np.tanh(np.sum(meaning[pairs[:, 0]] * meaning[pairs[:, 1]], axis=1))
        optimizer.minimize(_loss_of(table, pairs, wanted), var_list=[table])
        if step % (_STEPS // 30) == 0:
            seen.append(table.numpy())
    return seen


def _loss_of(table: gpuopt.Variable, pairs: np.ndarray, wanted: np.ndarray) -> Callable[[], Any]:
    def loss() -> Any:
        one, other = (gpuopt.embedding_lookup(table, each) for each in pairs.T)
        return np.mean((np.sum(one * other, axis=1) - wanted) ** 2)

    return loss
