"""Finds a gradient that holds NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.step.pairs import Gradient
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


def first_nonfinite(grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> str | None:
    """Describes the first gradient that holds NaN or infinity; None if all are finite."""
    for gradient, variable in grads_and_vars:
        values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
        backend = backend_for(variable.device)
        with backend.enter():
            finite = backend.xp.isfinite(values)
            if backend.to_host(finite.all()):
                continue
            first = np.unravel_index(int(finite.argmin()), values.shape)
            offset = tuple(int(i) for i in first)
            return (
                f'gradient for "{variable.name}" is not finite: {values.size - int(finite.sum())} '
                f"of {values.size} values, the first is {float(values[offset])} at {list(offset)}"
            )
    return None
