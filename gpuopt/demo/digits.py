"""The UCI handwritten digits that the demo trains on."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

NUM_PIXELS = 64
NUM_INTENSITIES = 17
NUM_CLASSES = 10

_NUM_TEST_IMAGES = 360
_SPLIT_SEED = 1797


class Digits(NamedTuple):
    """Images with their labels.

    Attributes:
        images: [num_images, 64] integers from 0 to 16.
        labels: [num_images] integers from 0 to 9.
    """

    images: np.ndarray[Any, np.dtype[np.int64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]


def load_digits() -> tuple[Digits, Digits]:
    """Reads the images that come with the package; see `data/README.md` for their source.

    Returns:
        (1,437 training images, 360 test images), the same ones in every call.
    """
    with (files(__package__) / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
        digits = Digits(arrays["images"].astype(np.int64), arrays["labels"].astype(np.int64))
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(digits.labels))
    train, test = order[_NUM_TEST_IMAGES:], order[:_NUM_TEST_IMAGES]
    return (
        Digits(digits.images[train], digits.labels[train]),
        Digits(digits.images[test], digits.labels[test]),
    )
