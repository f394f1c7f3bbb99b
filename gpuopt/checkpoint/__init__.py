"""Checkpoints: training state in files, and out of them."""

from gpuopt.checkpoint.saver import Saver, latest_checkpoint

__all__ = ["Saver", "latest_checkpoint"]
