"""The rules by which gradients are summed, over several steps or rows: the variable is the sum."""

from __future__ import annotations

from typing import Any

from gpuopt.rules.sources import CudaSource, kernel_root
from gpuopt.rules.update_rule import update_rule

_HEADER = "shared/accumulation.cuh"


@update_rule(cuda=CudaSource(kernel_root(), _HEADER, "gpuopt::BeginSum"))
def begin_sum(var: Any, grad: Any, *, divisor: Any) -> None:
    """Begins a sum: what was there before counts for nothing, NaN neither."""
    var[...] = grad / divisor


@update_rule(cuda=CudaSource(kernel_root(), _HEADER, "gpuopt::AddToSum"))
def add_to_sum(var: Any, grad: Any, *, divisor: Any) -> None:
    """Adds to a sum, and divides it: by 1, unless it is to become a mean."""
    var += grad
    var /= divisor


@update_rule(cuda=CudaSource(kernel_root(), _HEADER, "gpuopt::PlaceSum"))
def place_sum(var: Any, grad: Any, *, zero: Any) -> None:
    """Makes the variable what the gradient is, but -0 becomes 0, which `zero` must be."""
    var[...] = grad + zero
