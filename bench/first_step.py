"""The first step of a new process, whose program is compiled, or was by an earlier process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import gpuopt
from bench.harness import Offer, Workload
from bench.targets import Target

_COMPILED = "compiled by an earlier process"
_PROGRAM = """
import numpy as np
import gpuopt
table = gpuopt.Variable(np.ones((4096, 64), np.float32))
gradient = {gradient}
gpuopt.{optimizer}.apply_gradients([(gradient, table)])
"""
_DENSE = "np.ones((4096, 64), np.float32)"
_ROWS = f"gpuopt.IndexedSlices({_DENSE}, np.arange(4096))"
# The optimizer, and its gradient.
_STEPS = {
    "dense": ("AdamOptimizer()", _DENSE),
    "rows": ("LazyAdamOptimizer()", _ROWS),
    "slot_bits": ("AdamOptimizer(slot_bits=8)", _DENSE),
}
_MOST_MS = 500.0


def _offer() -> Iterator[Offer]:
    for kind in _STEPS:
        name = f"first_step_{kind}"
        target = Target(name, "extra_ms", _COMPILED, at_most=_MOST_MS)
        yield Offer(name, partial(_make, *_STEPS[kind]), [target])


def _make(optimizer: str, gradient: str) -> Workload:
    program = _PROGRAM.format(optimizer=optimizer, gradient=gradient)
    kept = TemporaryDirectory()

    def step() -> None:
        with TemporaryDirectory() as empty:
            _run(program, empty)

    def step_again() -> None:
        _run(program, kept.name)

    contenders = {"gpuopt": step, _COMPILED: step_again}
    return Workload(f"A process with one step of {optimizer}", contenders)


def _run(program: str, cache: str) -> None:
    """Runs a process with the gpuopt of this one, and with a folder of compiled programs."""
    found = str(Path(gpuopt.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": found, "GPUOPT_CACHE_DIR": cache}
    subprocess.run([sys.executable, "-c", program], cwd=cache, env=environment, check=True)


OFFERS = (*_offer(),)
