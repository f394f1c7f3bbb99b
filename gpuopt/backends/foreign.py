"""Arrays of other libraries, which share their memory by DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

# Of torch, those that numpy and CuPy take by DLPack.
_KNOWN = frozenset(
    [
        "bool",
        *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "complex64", "complex128"),
    ]
)


def is_foreign(value: Any) -> bool:
    """Whether this is another library's array, which numpy can take by DLPack alone."""
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack__"):
        return False
    # numpy's DLPack does not know ml_dtypes' types; JAX gives an array of them by `__array__`.
    dtype = getattr(value, "dtype", None)
    return not (isinstance(dtype, np.dtype) and dtype.kind == "V")


def array_of_foreign(value: Any, from_dlpack: Callable[[Any], Any]) -> Any:
    """Returns an array on the memory of another library's array.

    Args:
        value: The other library's.
        from_dlpack: Of numpy, or of CuPy in the context of the array's device.

    Raises:
        TypeError: a tensor of torch is sparse, would record what is done with it, or is of a type
            that numpy and CuPy do not have.
    """
    torch: Any = sys.modules.get("torch")
    tensor_type: Any = getattr(torch, "Tensor", ())  # another thread may be importing it
    if isinstance(value, tensor_type):
        if value.layout != torch.strided:
            has_rows = value.layout == torch.sparse_coo and value.sparse_dim() == 1
            slices = "tensor._values(), tensor._indices()[0]"
            raise TypeError(
                f"got a torch tensor of layout {value.layout}; pass tensor.to_dense(), or, for a "
                "gradient of some rows, gpuopt.IndexedSlices("
                f"{slices if has_rows else 'tensor.to_dense()[rows], rows'})"
            )
        if value.requires_grad:
            raise TypeError("got a torch tensor that requires a gradient; pass tensor.detach()")
        if value.is_quantized:
            raise TypeError("got a quantized torch tensor; pass tensor.dequantize()")
        # Views of other numbers than their memory holds.
        value = value.resolve_conj().resolve_neg()
        if value.dtype == torch.bfloat16:
            return from_dlpack(value.view(torch.int16)).view(ml_dtypes.bfloat16)
        if str(value.dtype).removeprefix("torch.") not in _KNOWN:
            raise TypeError(f"got a tensor of {value.dtype}; pass tensor.to(torch.float32)")
    return from_dlpack(value)
