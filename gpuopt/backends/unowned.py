"""numpy arrays that do not keep their memory alive."""

from __future__ import annotations

from typing import Any

import numpy as np


def array_at(address: int, form: Any) -> np.ndarray[Any, Any]:
    """Returns an array at an address, which owns nothing.

    Args:
        address: Of the first element; it may be one of a GPU, if the result is not read.
        form: An array of any module, whose shape, strides and dtype the result gets.
    """
    # bfloat16's type string means two bytes of no type; a view gives the array its dtype.
    return np.asarray(_Interface(address, form)).view(form.dtype)


class _Interface:
    """Gives numpy the address of memory, by the array interface."""

    def __init__(self, address: int, form: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": form.shape,
            "strides": form.strides,
            "typestr": form.dtype.str,
        }
