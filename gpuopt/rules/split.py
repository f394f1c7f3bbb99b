"""A float32 as a bfloat16 and the 16 missing bits; mirrored by kernels/shared/split.cuh."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_HALF = np.dtype(np.uint16)
_WHOLE = np.dtype(np.uint32)


def split(values: Any) -> tuple[Any, Any]:
    """Returns bfloat16 and uint16 arrays that together are float32 ones.

    The bfloat16 are rounded half up, by their bits. `joined` returns all numbers to the bit. NaNs
    become one NaN of their sign: rounded up, the bits of some would be those of infinity or 0.
    """
    bits = values.view(_WHOLE)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    whole = np.where(is_nan, (bits & 0xFF800000) | 0x400000, bits)
    weights = ((whole + 0x8000) >> 16).astype(_HALF)
    return weights.view(np.dtype(ml_dtypes.bfloat16)), (whole & 0xFFFF).astype(_HALF)


def joined(weights: Any, remainders: Any) -> Any:
    """Returns the float32 array that `split` has divided."""
    upper = weights.view(_HALF).astype(_WHOLE) - (remainders >> 15).astype(_WHOLE)
    return ((upper << 16) | remainders.astype(_WHOLE)).view(np.dtype(np.float32))
