"""Rules that add gradients of several steps or rows to a sum, which is their variable."""

from __future__ import annotations

from typing import Any

from gpuopt.rules.sources import CudaSource, kernel_root
from gpuopt.rules.update_rule import update_rule

_HEADER = "shared/accumulation.cuh"


@update_rule(cuda=CudaSource(kernel_root(), _HEADER, "gpuopt::BeginSum"))
def begin_sum(var: Any, grad: Any, *, divisor: Any) -> None:
    """Begins a sum: overwrites the old value, which may be NaN."""
    var[...] = grad / divisor


@update_rule(cuda=CudaSource(kernel_root(), _HEADER, "gpuopt::AddToSum"))
def add_to_sum(var: Any, grad: Any, *, divisor: Any) -> None:
    """Adds to a sum and divides the result; `divisor` is 1 unless it becomes a mean."""
    var += grad
    var /= divisor


@update_rule(cuda=CudaSource(kernel_root(), _HEADER, "gpuopt::PlaceSum"))
def place_sum(var: Any, grad: Any, *, zero: Any) -> None:
    """Stores the gradient; `zero` is 0, which turns -0 into 0, or -0, which keeps it."""
    var[...] = grad + zero
