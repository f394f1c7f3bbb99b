"""The protocol of norms: of many arrays of one device at once, and clipping by them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

Array = Any


class Clipping(IntEnum):
    """By which of TensorFlow's formulas an array is scaled.

    `n` is the norm and `c` the most that is allowed. Where no finite norm reaches `c`, each is x,
    and nothing overflows: see `may_be_reached`.
    """

    GLOBAL_NORM = 0
    """x * (c * min(1 / n, 1 / c)), and NaN if n is infinite."""
    NORM = 1
    """x * c / max(n, c)"""
    AVERAGE_NORM = 2
    """x * c * min(size / n, 1 / c)"""


def may_be_reached(most: np.floating[Any]) -> bool:
    """Whether a finite norm may be `most`, or more, in the type of `most`.

    Squares of such a norm would be infinite. The reciprocal of more is subnormal, and so 0 in the
    kernels, which ask the same.
    """
    return bool(most <= 1 / np.finfo(most.dtype).tiny)


class Norms(Protocol):
    """Norms of floating-point arrays, which are only read.

    16-bit numbers are computed with in float32. Sums are in the same order on every run. The caller
    is inside the backend's `enter`.
    """

    def sum_squares(self, arrays: Sequence[Array]) -> Array:
        """Returns the sum of the squares of all elements, float64 [1]."""

    def norm(self, arrays: Sequence[Array], sums: Sequence[Array], dtype: Any) -> Array:
        """Returns the root of the sum of the squares of all elements.

        Args:
            arrays: Of any shapes and floating-point types.
            sums: From `sum_squares` of other devices, each brought to this one.
            dtype: The result's: float32 or float64.

        Returns:
            On a GPU an array of no dimensions, for which the host has not waited; else a scalar.
        """

    def scale(
        self, arrays: Sequence[Array], norm: Array, most: np.floating[Any], clipping: Clipping
    ) -> list[Array]:
        """Returns new arrays, scaled to a norm.

        Args:
            arrays: Of any shapes and floating-point types.
            norm: A scalar of float32 or float64, on this device.
            most: The largest norm that is allowed.
            clipping: The formula.
        """
