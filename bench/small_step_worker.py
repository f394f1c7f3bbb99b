"""Times a small step, with whatever gpuopt the process finds: which may be of another commit.

Prints microseconds, the least of many, for each kind of step, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import thread_time

import numpy as np

import gpuopt

_STEPS, _SAMPLES = 100, 40


def main() -> None:
    steps = {
        "momentum": _make_step(gpuopt.MomentumOptimizer(1e-3, 0.9), is_counted=False),
        "counted_adam": _make_step(gpuopt.AdamOptimizer(1e-3), is_counted=True),
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_SAMPLES):
        for name, step in steps.items():
            began = thread_time()
            for _ in range(_STEPS):
                step()
            samples[name].append((thread_time() - began) / _STEPS * 1e6)
    json.dump({name: min(times) for name, times in samples.items()}, sys.stdout)


def _make_step(optimizer: gpuopt.Optimizer, *, is_counted: bool) -> Callable[[], object]:
    counter = gpuopt.Variable(0, dtype=np.int64) if is_counted else None
    pairs = [(np.full(64, 1e-3, np.float32), gpuopt.Variable(np.ones(64, np.float32)))]
    return lambda: optimizer.apply_gradients(pairs, counter)


if __name__ == "__main__":
    main()
