"""Reads TensorFlow's own checkpoints, through an optional tensorflow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuopt.errors import CheckpointError


class TensorFlowCheckpoint:
    """A checkpoint that `tf.train.Saver` wrote, opened by its prefix, as "model.ckpt-1000".

    Attributes:
        path: The prefix.
        names: The names of its tensors.
    """

    def __init__(self, prefix: str) -> None:
        """Opens the checkpoint.

        Raises:
            ModuleNotFoundError: tensorflow is not installed.
            CheckpointError: TensorFlow cannot read it.
        """
        try:
            from tensorflow.train import load_checkpoint
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{prefix} is TensorFlow's checkpoint: reading it needs tensorflow, which is not "
                "installed; convert it where TensorFlow is"
            ) from error
        self.path = prefix
        try:
            self._reader = load_checkpoint(prefix)
            self.names = frozenset(self._reader.get_variable_to_shape_map())
        except Exception as error:  # TensorFlow's errors are its own classes
            raise CheckpointError(f"TensorFlow cannot read {prefix}: {error}") from error

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns tensors by name."""
        try:
            return {name: np.asarray(self._reader.get_tensor(name)) for name in names}
        except Exception as error:
            raise CheckpointError(f"TensorFlow cannot read {self.path}: {error}") from error
