"""Moves optimizer states from and to other libraries."""

from gpuopt.interop.torch import optimizer_from_torch, optimizer_to_torch

__all__ = ["optimizer_from_torch", "optimizer_to_torch"]
