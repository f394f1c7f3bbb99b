"""Finds the object that owns an array's memory, and so when that memory ends.

A raw array's optimizer state is found again by memory, through whatever view of it the user makes.
So gpuopt must know when the memory ends, without keeping it alive: by a weak reference to the
object that owns it, which is rarely the array that the user passes. Where gpuopt does not know the
owner, a new view of the same memory cannot be told from new memory at the same address.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from array import array as PythonArray
from typing import Any, NamedTuple

import numpy as np

_CTYPES = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)


class Owner(NamedTuple):
    """The owner of an array's memory.

    Attributes:
        watched: An object for weak references. The memory lasts at least as long as this object.
        unknown: None if the memory ends with `watched`. Otherwise gpuopt does not know when the
            memory ends: `unknown` describes the object that lends it, for errors, and `watched` is
            an array that keeps it alive.
    """

    watched: Any
    unknown: str | None = None


def owner_of(array: np.ndarray[Any, Any], address: int) -> Owner:
    """Finds the owner of an array's memory.

    Args:
        array: Any view, in host memory.
        address: Of its first element.
    """
    while not array.flags.owndata:
        if isinstance(array.base, np.ndarray):
            array = array.base
        elif _has_its_own_bytes(array):
            return Owner(array)
        else:
            return owner_by_lender(array.base, array, address)
    return Owner(array)


def owner_by_lender(lender: Any, view: Any, address: int) -> Owner:
    """Finds the owner of memory that an array has from an object that is no array.

    Args:
        lender: The object that the array keeps alive for its memory; None if there is none.
        view: The array, of any module.
        address: An address inside the array.
    """
    lender = _through_views(lender)
    if isinstance(lender, np.ndarray):
        return owner_of(lender, address)
    if isinstance(lender, mmap.mmap | PythonArray):
        return Owner(lender)
    owner = None
    if isinstance(lender, _CTYPES):
        owner = _ctypes_owner(lender, address)
    elif isinstance(lender, getattr(sys.modules.get("torch"), "Tensor", ())):
        owner = _torch_storage(lender, view, address)
    return Owner(view, _describe(lender)) if owner is None else Owner(owner)


def _through_views(lender: Any) -> Any:
    """Returns the object below memoryviews and below the one that numpy's as_strided inserts."""
    if isinstance(lender, memoryview):
        return lender.obj
    if str(type(lender).__module__).startswith("numpy.") and isinstance(
        getattr(lender, "base", None), np.ndarray
    ):
        return lender.base
    return lender


def _ctypes_owner(lender: Any, address: int) -> Any:
    while isinstance(lender._b_base_, _CTYPES):  # a field or an element
        lender = lender._b_base_
    start = ctypes.addressof(lender)
    if not start <= address <= start + ctypes.sizeof(lender):
        return None
    if lender._b_needsfree_:
        return lender
    # multiprocessing.RawArray: the block of shared memory is free again when its wrapper goes.
    wrapper = getattr(lender, "_wrapper", None)
    return wrapper if type(wrapper).__module__ == "multiprocessing.heap" else None


def _torch_storage(tensor: Any, view: Any, address: int) -> Any:
    """Returns what `detach` and its kin share: Python's storage object lasts as long as torch's."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    is_inside = start <= address <= start + storage.nbytes() or not view.size
    # Before torch 2.1, each call made another object.
    return storage if is_inside and storage is tensor.untyped_storage() else None


def _has_its_own_bytes(array: Any) -> bool:
    """Whether an array lies in bytes of which no other view can be made, as unpickled ones do."""
    if isinstance(array.base, bytes):  # other views of it are read-only
        return True
    if not isinstance(_through_views(array.base), bytearray):
        return False
    return _num_references(array) == _REFERENCES_OF_ONE_VIEW.get(type(array.base))


def _num_references(array: Any) -> int:
    """Counts the references to an array's bytearray, and to the memoryviews in between."""
    count = sys.getrefcount(array.base)
    if isinstance(array.base, memoryview):
        # It refers to CPython's managed buffer, which all memoryviews of one buffer share.
        between = gc.get_referents(array.base)
        count += sys.getrefcount(array.base.obj) + sum(map(sys.getrefcount, between))
    return count


def _describe(lender: Any) -> str:
    if lender is None:
        return "something unknown"
    if type(lender).__name__ == "PyCapsule":
        return "a capsule, such as DLPack's"
    return f"an object of type {type(lender).__qualname__}"


_REFERENCES_OF_ONE_VIEW = {
    type(array.base): _num_references(array)
    for array in (np.frombuffer(bytearray(1), np.uint8), np.ndarray(1, np.uint8, bytearray(1)))
}


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
