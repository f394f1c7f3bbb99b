"""Prints, as JSON, how long the first two steps of a new process take: KIND DEVICE FOLDER.

The process finds compiled programs in the folder, and counts those that it adds.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import gpuopt

_SHAPE = 4096, 64


def main(kind: str, device: str, folder: str) -> None:
    xp: Any = import_module("numpy" if device == "cpu" else "cupy")
    gradient: Any = xp.ones(_SHAPE, "float32")
    variable = gpuopt.Variable(xp.ones(_SHAPE, "float32"))
    optimizer: gpuopt.Optimizer = gpuopt.AdamOptimizer(slot_bits=8 if kind == "slot_bits" else 32)
    if kind == "rows":
        optimizer = gpuopt.LazyAdamOptimizer()
        gradient = gpuopt.IndexedSlices(gradient, xp.arange(_SHAPE[0]))
    times = []
    before = _count_compiled(folder)
    for _ in range(2):
        _wait_for(device, xp)
        started = perf_counter()
        optimizer.apply_gradients([(gradient, variable)])
        _wait_for(device, xp)
        times.append(round(1e3 * (perf_counter() - started), 3))
    found = {"first_step_ms": times[0], "second_step_ms": times[1]}
    print(json.dumps({**found, "compiled": _count_compiled(folder) - before}))


def _wait_for(device: str, xp: Any) -> None:
    if device != "cpu":
        xp.cuda.Device().synchronize()


def _count_compiled(folder: str) -> int:
    return sum(file.suffix in (".cubin", ".so") for file in Path(folder).rglob("*"))


if __name__ == "__main__":
    main(*sys.argv[1:])
