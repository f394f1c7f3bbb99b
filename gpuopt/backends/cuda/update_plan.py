"""Where dense updates find the arrays of many variables: tables in device memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Target
from gpuopt.backends.cuda.launch_shapes import DENSE_CHUNK
from gpuopt.backends.cuda.launcher import Launcher

# Rows of the table; the slots' follow.
_SIZE, _GRAD, _VAR = range(3)


class UpdatePlan:
    """The tables of one set of variables: made once, as variables and slots stay where they are.

    Arrays that are not contiguous have a contiguous stand-in, which is filled before an update and
    copied back after it.

    Attributes:
        dtype: Of all variables.
        num_variables: Those that have elements.
    """

    def __init__(self, launcher: Launcher, targets: Sequence[Target]) -> None:
        self._launcher = launcher
        self.dtype = targets[0].var.dtype
        self._positions = [i for i, target in enumerate(targets) if target.var.size]
        self.num_variables = len(self._positions)
        arrays = [[targets[i].var, *targets[i].slots] for i in self._positions]
        # (array, its contiguous stand-in)
        self._stand_ins: list[tuple[Any, Any]] = []
        flat = [[self._contiguous(array) for array in of_variable] for of_variable in arrays]
        self._arrays = flat
        num_rows = 2 + len(flat[0]) if flat else 2
        table = np.zeros((num_rows, len(flat)), np.int64)
        if flat:
            table[_SIZE] = [of_variable[0].size for of_variable in flat]
            table[_VAR:] = np.array(
                [[launcher.address(array) for array in of_variable] for of_variable in flat]
            ).T
        self._host_table = table
        self._chunks = _chunks(table[_SIZE])
        self._written = _Memory(table[_VAR:], table[_SIZE] * self.dtype.itemsize)
        # By stream, as a kernel of another stream may still read an older table.
        self._on_device: dict[Hashable, tuple[Any, Any, np.ndarray[Any, Any]]] = {}

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def begin(self, gradients: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
        """Fills the stand-ins, and points the current stream's table to the gradients.

        Returns:
            (table, chunks, arrays to keep until the update is enqueued).
        """
        for array, stand_in in self._stand_ins:
            stand_in[...] = array
        ours = [self._readable(gradients[i]) for i in self._positions]
        addresses = np.array(list(map(self._launcher.address, ours)), np.int64)
        stream = self._launcher.stream()
        found = self._on_device.get(stream)
        if found is not None and np.array_equal(found[2], addresses):
            return found[0], found[1], ours
        copied = self._written.overlaps(addresses, self._host_table[_SIZE] * self.dtype.itemsize)
        for position in copied:
            ours[position] = ours[position].copy()
            addresses[position] = self._launcher.address(ours[position])
        if found is None:
            found = self._upload_tables(addresses)
        else:
            self._launcher.upload(found[0][_GRAD], addresses)
        # Copies are gone at the next step, when their addresses may belong to anything.
        remembered = np.zeros(0, np.int64) if copied else addresses
        self._on_device[stream] = *found[:2], remembered
        return found[0], found[1], ours

    def end(self) -> None:
        """Copies the stand-ins back."""
        for array, stand_in in self._stand_ins:
            array[...] = stand_in

    def _contiguous(self, array: Any) -> Any:
        if array.flags.c_contiguous:
            return array
        stand_in = self._launcher.xp.empty(array.shape, dtype=array.dtype)
        self._stand_ins.append((array, stand_in))
        return stand_in

    def _readable(self, gradient: Any) -> Any:
        if gradient.flags.c_contiguous:
            return gradient
        return self._launcher.xp.ascontiguousarray(gradient)

    def _upload_tables(self, grads: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
        xp = self._launcher.xp
        host = self._host_table.copy()
        host[_GRAD] = grads
        table = xp.empty(host.shape, dtype=np.int64)
        self._launcher.upload(table, host)
        chunks = xp.empty(self._chunks.shape, dtype=np.uint32)
        self._launcher.upload(chunks, self._chunks)
        return table, chunks, grads


class _Memory:
    """Ranges of memory that do not overlap each other.

    Args:
        starts: int64 [num_rows, num_variables], addresses.
        sizes: int64 [num_variables], in bytes.
    """

    def __init__(self, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> None:
        ends = starts + sizes
        order = np.argsort(starts, axis=None)
        self._starts = starts.reshape(-1)[order]
        self._ends = ends.reshape(-1)[order]
        # An element's gradient may be the variable's own element: it is read before it is written.
        self._own = starts[0]

    def overlaps(self, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> list[int]:
        """Returns which of other ranges overlap these, unless they are a variable's own."""
        if not self._starts.size:
            return []
        following = np.searchsorted(self._starts, starts + sizes, side="left")
        before = np.maximum(following - 1, 0)
        touching = (following > 0) & (self._ends[before] > starts) & (starts != self._own)
        return np.flatnonzero(touching).tolist()


def _chunks(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cuts variables into parts of DENSE_CHUNK elements: uint32 [num_chunks, (variable, part)]."""
    parts = -(-sizes // DENSE_CHUNK)
    variables = np.repeat(np.arange(parts.size), parts)
    first = np.cumsum(parts) - parts
    numbers = np.arange(variables.size) - first[variables]
    return np.stack([variables, numbers], axis=1).astype(np.uint32)
