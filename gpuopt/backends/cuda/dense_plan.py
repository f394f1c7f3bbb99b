"""Where dense updates find the arrays of many variables: tables in device memory."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from operator import attrgetter, eq
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends.backend import Target, Updated
from gpuopt.backends.cuda.in_flight import LastUpdate
from gpuopt.backends.cuda.launch_shapes import DENSE_CHUNK
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.order import MOST_STREAMS
from gpuopt.backends.cuda.structs import GRAD_ROW as _GRAD
from gpuopt.backends.cuda.structs import SIZE_ROW as _SIZE
from gpuopt.backends.cuda.structs import VAR_ROW as _VAR
from gpuopt.backends.cuda.structs import Chunk
from gpuopt.backends.cuda.watched import Watched
from gpuopt.backends.unowned import array_at
from gpuopt.computed_once import computed_once

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


class _Tables(NamedTuple):
    """What the kernel reads on one stream.

    Attributes:
        table: int64 [2 + number of arrays, num_variables].
        chunks: uint32 [num_chunks, fields of Chunk].
        grads: The addresses of gradients in `table`.
        version: Of the caller's arrays, if `grads` are their addresses; else None.
    """

    table: Any
    chunks: Any
    grads: np.ndarray[Any, Any]
    version: int | None


class _Accepted(NamedTuple):
    """The last gradients that fitted.

    Attributes:
        ids: Theirs.
        watched: The gradients, if they came twice; else None.
        version: See `DensePlan.accept`.
    """

    ids: tuple[int, ...]
    watched: Watched | None
    version: int


class DensePlan:
    """The tables of one set of variables: made once, as variables and slots stay where they are.

    Arrays that are not contiguous have a contiguous stand-in, which is filled before an update and
    copied back after it.

    Attributes:
        dtype: Of all variables.
        targets: The variables and their slots, in order.
        num_variables: The number of variables that have elements.
        updated: The variables and slots.
        memory: Everything that an update writes to, to be kept alive.
        last_update: Theirs, from `UpdateOrder`.
    """

    def __init__(
        self, launcher: Launcher, targets: Sequence[Target], updated: Sequence[Updated]
    ) -> None:
        self._launcher = launcher
        self.targets = targets
        self.dtype = targets[0].var.dtype
        self._shapes = [var.shape for var, _ in targets]
        self._versions = itertools.count(1)
        self.updated = updated
        self._positions = [i for i, target in enumerate(targets) if target.var.size]
        self.num_variables = len(self._positions)
        arrays = [[targets[i].var, *targets[i].slots] for i in self._positions]
        # (array, its contiguous stand-in)
        self._stand_ins: list[tuple[Any, Any]] = []
        flat = [[self._contiguous(array) for array in of_variable] for of_variable in arrays]
        self.memory = targets, flat
        table = np.zeros((3 + len(targets[0].slots), len(flat)), np.int64)
        if flat:
            table[_SIZE] = [of_variable[0].size for of_variable in flat]
            table[_VAR:] = np.array(
                [[launcher.address(array) for array in of_variable] for of_variable in flat]
            ).T
        self._host_table = table
        self._chunks = _chunks(table[_SIZE])
        self._written = _Memory(table[_VAR:], table[_SIZE] * self.dtype.itemsize)
        # By stream, as a kernel of another stream may still read an older table.
        self._on_device: dict[Hashable, _Tables] = {}
        self.last_update: LastUpdate | None = None
        self._last_accepted = _Accepted((), None, 0)

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def accept(self, gradients: Sequence[Any]) -> int | None:
        """Returns a version of gradients that fit, else None; see `Backend`'s `DensePlan`.

        The same objects are not looked at again while they live.
        """
        last = self._last_accepted
        ids = tuple(map(id, gradients))
        is_again = ids == last.ids
        if is_again and last.watched is not None and last.watched.are_alive:
            return last.version
        if not (
            set(map(type, gradients)) == {self._launcher.xp.ndarray}
            and self._launcher.owns(gradients)
            and set(map(_dtype_of, gradients)) == {self.dtype}
            # Not as lists: thousands of tuples at once would set off the garbage collection.
            and all(map(eq, map(_shape_of, gradients), self._shapes))
        ):
            return None
        version = next(self._versions)
        self._last_accepted = _Accepted(ids, Watched(gradients) if is_again else None, version)
        return version

    @computed_once
    def written_bounds(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Where the variables and slots themselves begin, and where they end."""
        arrays = [array for var, slots in self.targets for array in (var, *slots) if array.size]
        bounds = [bounds_of(self._launcher, array) for array in arrays]
        starts, ends = zip(*bounds, strict=True) if bounds else ((), ())
        return np.array(starts, np.int64), np.array(ends, np.int64)

    def begin(
        self, gradients: Sequence[Any], version: int | None = None
    ) -> tuple[Any, Any, Sequence[Any]]:
        """Fills the stand-ins, and points the current stream's table to the gradients.

        Args:
            gradients: One for each target.
            version: From `accept`; None if unknown.

        Returns:
            (table, chunks, arrays to keep until the update is enqueued).
        """
        for array, stand_in in self._stand_ins:
            stand_in[...] = array
        stream = self._launcher.stream()
        found = self._on_device.get(stream)
        if found is not None and version is not None and found.version == version:
            return found.table, found.chunks, gradients
        ours = [gradients[i] for i in self._positions]
        strided = self._launcher.strided(ours)
        for position in strided:
            ours[position] = self._launcher.xp.ascontiguousarray(ours[position])
        addresses = self._launcher.addresses(ours)
        if found is not None and np.array_equal(found.grads, addresses):
            self._on_device[stream] = found._replace(version=None if strided else version)
            return found.table, found.chunks, ours
        copied = self._written.overlaps(addresses, self._host_table[_SIZE] * self.dtype.itemsize)
        for position in copied:
            ours[position] = ours[position].copy()
            addresses[position] = self._launcher.address(ours[position])
        if found is None:
            if len(self._on_device) == MOST_STREAMS:
                del self._on_device[next(iter(self._on_device))]
            table, chunks = self._upload_tables(addresses)
        else:
            table, chunks = found.table, found.chunks
            del self._on_device[stream]  # until it is whole again
            self._launcher.upload(table[_GRAD], addresses)
        # Copies are gone at the next step, when their addresses may belong to anything.
        remembered = np.zeros(0, np.int64) if copied else addresses
        version = None if strided or copied else version
        self._on_device[stream] = _Tables(table, chunks, remembered, version)
        return table, chunks, ours

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

    def _upload_tables(self, grads: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        xp = self._launcher.xp
        host = self._host_table.copy()
        host[_GRAD] = grads
        table = xp.empty(host.shape, dtype=np.int64)
        self._launcher.upload(table, host)
        chunks = xp.empty(self._chunks.shape, dtype=np.uint32)
        self._launcher.upload(chunks, self._chunks)
        return table, chunks


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
    """Cuts variables into chunks of DENSE_CHUNK elements: uint32 [num_chunks, fields of Chunk]."""
    parts = -(-sizes // DENSE_CHUNK)
    variables = np.repeat(np.arange(parts.size), parts)
    first = np.cumsum(parts) - parts
    numbers = np.arange(variables.size) - first[variables]
    return np.stack(Chunk(variable=variables, number=numbers), axis=1).astype(np.uint32)


def overlapping(launcher: Launcher, plans: Sequence[DensePlan], arrays: Sequence[Any]) -> list[int]:
    """Returns the positions of arrays that share memory with what any of the plans writes."""
    starts = launcher.addresses(arrays)
    ends = starts + np.array([array.nbytes for array in arrays], np.int64)
    for position in launcher.strided(arrays):
        starts[position], ends[position] = bounds_of(launcher, arrays[position])
    bounds = [plan.written_bounds for plan in plans]
    written_starts, written_ends = (
        np.sort(np.concatenate(each)) for each in zip(*bounds, strict=True)
    )
    overlaps = np.searchsorted(written_ends, starts, "right") < np.searchsorted(
        written_starts, ends, "left"
    )
    return np.flatnonzero(overlaps & (starts < ends)).tolist()


def bounds_of(launcher: Launcher, array: Any) -> tuple[int, int]:
    """Returns the first address of an array, and the one after its last."""
    return byte_bounds(array_at(launcher.address(array), array))
