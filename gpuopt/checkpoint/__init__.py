"""Saving and restoring."""

from gpuopt.checkpoint.checkpoint_folder import latest_checkpoint
from gpuopt.checkpoint.saver import Saver

__all__ = ["Saver", "latest_checkpoint"]
