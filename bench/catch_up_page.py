"""Draws the pictures of docs/guides/adam_for_embeddings.md.

`python -m bench.catch_up_page FILE...` draws the steps' times in files of results of
`python -m bench`, and writes them below the picture; of a workload in several files, the last one
counts. `--training` also trains the forms, and draws what differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gpuopt
from bench.catch_up import HEIGHTS, NUM_DIFFERENT
from bench.harness import ROOT
from bench.page import make_table, name_file, picture, replace_between

PAGE = ROOT / "docs" / "guides" / "adam_for_embeddings.md"
COMMAND = "python -m bench.catch_up_page"
_CONTENDERS = {
    "gpuopt": "catch_up=True",
    "LazyAdam": "LazyAdam",
    "all rows": "all rows",
    "torch SparseAdam": "torch's SparseAdam",
}
_WIDE = {"catch_up_step": "a step, 1,000,000 x 64", "catch_up_flush": "all brought up to date"}
_STEPS, _BATCH = 600, 64
_WORDS, _WIDTH = 2_000, 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.catch_up_page", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="files of results of python -m bench")
    parser.add_argument("--training", action="store_true", help="also train, which takes a minute")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for file in options.results:
        found |= json.loads(file.read_text())["workloads"]
    times = {
        name: {who: each["p10_ms"] for who, each in found[name]["contenders"].items()}
        for name in (*_WIDE, *(f"catch_up_step_{height}" for height in HEIGHTS))
    }
    _draw_times(times)
    files = " and\n".join(f"`{name_file(each)}`" for each in options.results)
    written = f"{_growth(times)}\n\n{_table(times)}\nFrom {files}.\n"
    page = replace_between(PAGE.read_text(), COMMAND, written)
    PAGE.write_text(page)
    if options.training:
        _draw_training()


def _growth(times: Mapping[str, Mapping[str, float]]) -> str:
    """Says how much longer steps take in the curve's tallest table than in its lowest one."""
    low, *_, tall = (times[f"catch_up_step_{key}"] for key in HEIGHTS)
    ours, lazy = (tall[who] / low[who] for who in ("gpuopt", "LazyAdam"))
    return (
        f"Each step of the curve names {NUM_DIFFERENT:,} different rows. In the tallest table, it\n"
        f"takes {ours:.1f} times as long as in the lowest with rows that catch up, and {lazy:.1f} "
        "times with\nLazyAdam: the rows of the lowest stay in the caches."
    )


def _table(times: Mapping[str, Mapping[str, float]]) -> str:
    names = {**_WIDE}
    names |= {f"catch_up_step_{key}": f"a step, {rows:,} x 16" for key, rows in HEIGHTS.items()}
    headings = ("milliseconds, the tenth percentile", *_CONTENDERS.values(), "one step of all rows")
    rows = [
        [
            title,
            *(_number(times[name].get(who)) for who in _CONTENDERS),
            _number(times[name].get("a step of all rows")),
        ]
        for name, title in names.items()
    ]
    return make_table(headings, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _draw_times(times: Mapping[str, Mapping[str, float]]) -> None:
    curves = {}
    for who, title in _CONTENDERS.items():
        points = [
            (height, times[f"catch_up_step_{key}"][who])
            for key, height in HEIGHTS.items()
            if who in times[f"catch_up_step_{key}"]
        ]
        if points:
            curves[title] = np.array(points)
    _draw(
        "catch_up_times.svg", curves, "rows of the table", "milliseconds a step", logarithmic="xy"
    )


def _draw_training() -> None:
    """Draws how far rows end from where all rows are moved in each step."""
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
    label = "distance from all rows,\nas a part of their movement"
    _draw("catch_up_training.svg", curves, "steps", label, logarithmic="y")


def _train(optimizer: Any) -> Sequence[np.ndarray]:
    """Learns vectors of words from pairs of them by Zipf's law; returns the table now and then."""
    rng = np.random.default_rng(3)
    table = gpuopt.Variable(rng.normal(scale=0.1, size=(_WORDS, _WIDTH)), dtype=np.float32)
    meaning = rng.normal(size=(_WORDS, _WIDTH)).astype(np.float32)
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


def _draw(file: str, curves: Mapping[str, np.ndarray], x: str, y: str, *, logarithmic: str) -> None:
    with picture(file, f"{y}, by {x}", (6.0, 3.4)) as figure:
        panel = figure.subplots()
        for (name, points), marker in zip(curves.items(), "osD^", strict=False):
            panel.plot(*points.T, label=name, marker=marker, markersize=4, linewidth=1.3)
        if "x" in logarithmic:
            panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        panel.legend(frameon=False)


if __name__ == "__main__":
    main()
