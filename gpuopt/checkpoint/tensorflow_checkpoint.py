"""Reads TensorFlow's own checkpoints, through an optional tensorflow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gpuopt.errors import CheckpointError

# The ends of the names of a checkpoint's files.
_FILES = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
# The last bytes of TensorFlow's table files; the first format keeps all tensors in one.
_END_OF_TABLE = bytes.fromhex("57fb808b247547db")


def find_checkpoint(path: str) -> str | None:
    """Returns the prefix of TensorFlow's checkpoint at a path, or None if there is none.

    Args:
        path: The prefix, as "model.ckpt-1000", or one of its files.

    Raises:
        CheckpointError: the checkpoint is of TensorFlow's first format.
    """
    prefixes = path, _FILES.sub("", path)
    for prefix in prefixes:
        if Path(prefix + ".index").is_file():
            return prefix
    for prefix in prefixes:
        if _ends_as_table(Path(prefix)):
            raise CheckpointError(
                f"{prefix} is a checkpoint of TensorFlow's first format (V1), which is not read: "
                "restore it with TensorFlow, and save it by "
                "tf.train.Saver(write_version=tf.train.SaverDef.V2)"
            )
    return None


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


def _ends_as_table(path: Path) -> bool:
    """Whether a path is a table file of TensorFlow's, and so a checkpoint of the first format."""
    if not path.is_file() or path.stat().st_size < len(_END_OF_TABLE):
        return False
    with path.open("rb") as file:
        file.seek(-len(_END_OF_TABLE), os.SEEK_END)
        return file.read() == _END_OF_TABLE
