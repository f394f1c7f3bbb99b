"""Checkpoints: training state in files, and out of them."""

from gpuopt.checkpoint.saver import Saver, latest_checkpoint
from gpuopt.checkpoint.torch_state import optimizer_from_torch, optimizer_to_torch

__all__ = ["Saver", "latest_checkpoint", "optimizer_from_torch", "optimizer_to_torch"]
