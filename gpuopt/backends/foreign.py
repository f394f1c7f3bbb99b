"""Arrays of other libraries, which share their memory by DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


def is_foreign(value: Any) -> bool:
    """Whether this is another library's array, which numpy can take by DLPack alone."""
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack__"):
        return False
    # numpy's DLPack does not know bfloat16; JAX gives an array of it by `__array__`.
    return bool(getattr(value, "dtype", None) != ml_dtypes.bfloat16)


def array_of_foreign(value: Any, from_dlpack: Callable[[Any], Any]) -> Any:
    """Returns an array on the memory of another library's array.

    Args:
        value: The other library's.
        from_dlpack: Of numpy, or of CuPy in the context of the array's device.

    Raises:
        TypeError: a tensor of torch is sparse, or would record what is done with it.
    """
    torch: Any = sys.modules.get("torch")
    tensor_type: Any = getattr(torch, "Tensor", ())  # another thread may be importing it
    if isinstance(value, tensor_type):
        if value.layout != torch.strided:
            raise TypeError(
                f"got a torch tensor of layout {value.layout}; pass tensor.to_dense(), or, for a "
                "sparse gradient, gpuopt.IndexedSlices(tensor._values(), tensor._indices()[0])"
            )
        if value.requires_grad:
            raise TypeError("got a torch tensor that requires a gradient; pass tensor.detach()")
        if value.dtype == torch.bfloat16:
            return from_dlpack(value.view(torch.int16)).view(ml_dtypes.bfloat16)
    return from_dlpack(value)
