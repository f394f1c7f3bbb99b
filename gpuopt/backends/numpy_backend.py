"""Updates in host memory, by numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gpuopt.backends.backend import Scalars, Update, compute_type
from gpuopt.device import Device
from gpuopt.update_rule import UpdateRule

# A cache line, and an AVX-512 register.
_ALIGNMENT_BYTES = 64
# A rule's temporaries stay in the second-level cache. Twice as much costs four times the time: each
# temporary is then fresh memory from the operating system.
_CHUNK_BYTES = 128 * 1024
_READWRITE: list[list[Literal["readwrite"]]] = [["readwrite"]]


class NumpyBackend:
    """The CPU's backend; see `Backend` for what each method promises."""

    xp: Any = np
    device = Device.cpu

    def full(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any
    ) -> np.ndarray[Any, Any]:
        size = math.prod(shape) * dtype.itemsize
        memory = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        storage = memory[start : start + size].view(dtype).reshape(shape)
        storage[...] = value
        return storage

    def to_host(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array.copy()

    def apply_dense(self, rule: UpdateRule, updates: Sequence[Update], scalars: Scalars) -> None:
        for update in updates:
            _apply(rule, update, scalars)

    def apply_sparse(
        self, rule: UpdateRule, update: Update, scalars: Scalars, *, touches_all_rows: bool
    ) -> None:
        var, grad, slots, indices = update
        assert indices is not None
        sums, rows = self.sum_duplicate_rows(grad, indices)
        touched = Update(var[rows], sums, [slot[rows] for slot in slots])
        if touches_all_rows:
            zero = np.broadcast_to(sums.dtype.type(0), var.shape)
            _apply(rule, Update(var, zero, slots), scalars)
        _apply(rule, touched, scalars)
        with np.errstate(all="ignore"):
            for array, new_rows in zip([var, *slots], [touched.var, *touched.slots], strict=True):
                array[rows] = new_rows

    def sum_duplicate_rows(
        self, values: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        values = values.astype(compute_type(values.dtype), copy=False)
        unique, first, inverse = np.unique(indices, return_index=True, return_inverse=True)
        if unique.size == indices.size:
            return values, indices
        order = np.argsort(first)
        position = np.empty_like(order)
        position[order] = np.arange(order.size)
        sums = np.zeros((unique.size, *values.shape[1:]), values.dtype)
        with np.errstate(all="ignore"):
            np.add.at(sums, position[inverse], values)
        return sums, unique[order]


def _apply(rule: UpdateRule, update: Update, scalars: Scalars) -> None:
    """Walks a variable in flat chunks of the compute type.

    nditer copies a chunk in and out only where the storage is of another type or not contiguous,
    and copies the gradient beforehand where it shares memory with what is written.
    """
    real = compute_type(update.var.dtype)
    chunks = np.nditer(
        [update.var, update.grad, *update.slots],
        flags=["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"],
        op_flags=[["readwrite"], ["readonly"], *_READWRITE * len(update.slots)],
        op_dtypes=[real] * (2 + len(update.slots)),
        casting="unsafe",
        buffersize=_CHUNK_BYTES // np.dtype(real).itemsize,
    )
    # NaN and infinity pass through in silence, as on a GPU and in TensorFlow.
    with np.errstate(all="ignore"), chunks:
        for chunk in chunks:
            rule.apply(*chunk, **scalars)
