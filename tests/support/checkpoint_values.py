"""What tests of checkpoints look at: names in a folder, and values that are all equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpuopt import Variable
from gpuopt.checkpoint.checkpoint_file import open_checkpoint


def variable(value: float = 0.0, size: int = 3, name: str = "w") -> Variable:
    return Variable(np.full(size, value, np.float32), name=name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def value(path: Path | str, name: str = "w") -> float:
    """Returns what a checkpoint's elements are; fails unless it is whole, and they are equal."""
    with open_checkpoint(Path(path)) as checkpoint:
        (found,) = set(checkpoint.read([name])[name].reshape(-1).tolist())
        return float(found)
