"""Launches of dense updates of many variables, whose addresses are in device memory."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from operator import attrgetter, eq
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends.backend import INDEX_DTYPES, Scalars, Target, Updated, accepted_dtype
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.dense_launch import MOST_LISTS, DenseLaunch, SummedLaunch
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launch_shapes import (
    LANE_CODES,
    PACK_BYTES,
    dense_blocks,
    dense_chunk,
    dense_threads,
    lanes_per_block,
)
from gpuopt.backends.cuda.launcher import Launch, Launcher, to_device
from gpuopt.backends.cuda.mixed import Storage, slot_dtype, storage_of
from gpuopt.backends.cuda.order import MOST_STREAMS, LastUpdate
from gpuopt.backends.cuda.scalar_arguments import ScalarArguments
from gpuopt.backends.cuda.structs import FEW_GRADIENTS, Chunk, FewGradients
from gpuopt.backends.memory_owner import array_at
from gpuopt.backends.record import StepRecord
from gpuopt.codecs import Codecs
from gpuopt.computed_once import computed_once
from gpuopt.rules.update_rule import UpdateRule

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


class _Liveness:
    """Notices the end of objects, without keeping them alive: a new object may get an old one's id.

    Attributes:
        is_whole: Whether all of the objects live.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.is_whole = True
        end = partial(_note_end, weakref.ref(self))
        self._references = [weakref.ref(each, end) for each in objects]


def _note_end(liveness: weakref.ref[_Liveness], dead: weakref.ref[Any]) -> None:
    found = liveness()
    if found is not None:
        found.is_whole = False
        found._references = []


class _Accepted(NamedTuple):
    """Gradients that fitted.

    Attributes:
        ids: Theirs, as bytes.
        alive: Whether they still live, if they came twice; else None: their ids may be reused.
        version: See `DensePlan.accept`.
    """

    ids: bytes
    alive: _Liveness | None
    version: int


class _NewMemory:
    """The identity of a plan's own memory."""

    def __init__(self) -> None:
        self.last_update: Any = None


class DensePlan:
    """The tables of one set of variables: made once, as variables and slots stay where they are.

    Arrays that are not contiguous have a contiguous stand-in, which is filled before an update and
    copied back after it.

    Attributes:
        codecs: How the variables and their slots are stored.
        dtype: Of the gradients that `accept` accepts.
        targets: The variables and their slots, in order.
        num_variables: The number of variables that have elements.
        updated: The identities of the variables and slots, and of the stand-ins' memory.
        new_memory: The identity of the stand-ins' memory, if there are any. It was allocated on one
            stream, and the first update may be on another.
        memory: Everything that an update writes to, to be kept alive.
        last_update: Theirs, from `UpdateOrder`.
    """

    def __init__(
        self,
        launcher: Launcher,
        targets: Sequence[Target],
        codecs: Codecs,
        updated: Sequence[Updated],
        groups: Sequence[int] | None,
    ) -> None:
        self._launcher = launcher
        self.targets, self.codecs = targets, codecs
        self.dtype = codecs.var.gradient_dtype
        self._shapes = [target.var.shape for target in targets]
        self._versions = itertools.count(1)
        self._positions = [i for i, target in enumerate(targets) if target.var.size]
        self.num_variables = len(self._positions)
        self._every_array = [target.arrays for target in targets]
        arrays = [self._every_array[i] for i in self._positions]
        # (array, its contiguous stand-in)
        self._stand_ins: list[tuple[Any, Any]] = []
        flat = [[self._contiguous(array) for array in of_variable] for of_variable in arrays]
        self.has_stand_ins = bool(self._stand_ins)
        self.new_memory = _NewMemory() if self.has_stand_ins else None
        self.updated = (*updated, self.new_memory) if self.new_memory is not None else updated
        self.memory = targets, flat
        self._sizes = np.array([of_variable[0].size for of_variable in flat], np.int64)
        # [num_variables, the number of each one's arrays]
        self._addresses = np.array(
            [[launcher.address(array) for array in of_variable] for of_variable in flat], np.int64
        ).reshape(len(flat), len(self._every_array[0]))
        # Of each array: slots of rows are smaller than their variable.
        self._bytes = np.array(
            [[array.nbytes for array in of_variable] for of_variable in flat], np.int64
        ).reshape(self._addresses.shape)
        self._groups = None
        if groups is not None:
            self._groups = np.array([groups[i] for i in self._positions], np.int64)
        sizes, pack_size = self._sizes_and_pack()
        elements = int(sizes.sum())
        self._chunk_size = dense_chunk(elements, launcher.num_multiprocessors)
        self._chunks = _chunks(sizes, self._chunk_size)
        self._num_threads = dense_threads(elements, max(1, len(self._chunks)), pack_size)
        self._written = _Memory(self._addresses, self._bytes)
        # By stream and rule, the latest last.
        self._launches: dict[Hashable, DenseLaunch] = {}
        self.last_update: LastUpdate | None = None
        # The lists that `accept` took last, the latest first.
        self._accepted: list[_Accepted] = []

    def accept(
        self, gradients: Sequence[Any], others: Collection[np.dtype[Any]] = ()
    ) -> int | None:
        """Returns a version of gradients that fit, else None; see `Backend`'s `DensePlan`.

        The same objects are not looked at again while they live.
        """
        # As bytes: integers for thousands of ids would take three times as long. Not in a
        # dictionary, whose hash takes longer than a comparison.
        ids = np.fromiter(gradients, object, len(gradients)).tobytes()
        last = next((each for each in self._accepted if each.ids == ids), None)
        if last is not None and last.alive is not None and last.alive.is_whole:
            return last.version
        dtype = self.dtype
        if others and type(gradients[0]) is self._launcher.xp.ndarray:
            dtype = accepted_dtype(gradients[0].dtype, dtype, others)
        if not (
            set(map(type, gradients)) == {self._launcher.xp.ndarray}
            and self._launcher.owns(gradients)
            and set(map(_dtype_of, gradients)) == {dtype}
            # Not as lists: thousands of tuples at once would set off the garbage collection.
            and all(map(eq, map(_shape_of, gradients), self._shapes))
        ):
            return None
        version = next(self._versions)
        earlier = [each for each in self._accepted if each is not last]
        alive = None if last is None else _Liveness(gradients)
        self._accepted = [_Accepted(ids, alive, version), *earlier[: MOST_LISTS - 1]]
        return version

    def accept_rows(self, values: Any, indices: Any) -> tuple[int, ...] | None:
        """See `Backend`'s `DensePlan`: a kernel checks that rows are within range."""
        [shape], array = self._shapes, self._launcher.xp.ndarray
        if not (
            type(values) is type(indices) is array
            and self._launcher.owns((values, indices))
            and values.dtype == self.dtype
            and indices.dtype in INDEX_DTYPES
            and indices.ndim == 1
            and shape
            and values.shape == (*indices.shape, *shape[1:])
        ):
            return None
        return tuple(shape)

    def measured(self, positions: Sequence[int], bounds: Sequence[float]) -> np.ndarray[Any, Any]:
        """Returns `MeasuredVariable` for variables that have elements, with the bounds of each.

        int64 [their number, 4], of which the last is a float64.
        """
        numbers = np.searchsorted(self._positions, positions)
        bits = np.array(bounds, np.float64).view(np.int64)
        # The companion comes last.
        return np.column_stack((numbers, self._addresses[numbers][:, [0, -1]], bits))

    @computed_once
    def width(self) -> int:
        """How many elements a row of the only variable has."""
        return math.prod(self._shapes[0][1:])

    @computed_once
    def height(self) -> int:
        """How many rows the only variable has."""
        return self._shapes[0][0]  # type: ignore[no-any-return]

    @computed_once
    def addresses(self) -> list[int]:
        """Where the only variable and its slots, or their stand-ins, are."""
        return self._addresses[0].tolist()  # type: ignore[no-any-return]

    @computed_once
    def _written_spans(self) -> list[tuple[int, int]]:
        """Where the only variable and its slots, or their stand-ins, begin and end."""
        sizes = self._bytes[0].tolist()
        return [(begin, begin + size) for begin, size in zip(self.addresses, sizes, strict=True)]

    @computed_once
    def written_bounds(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Where the variables and slots themselves begin, and where they end."""
        arrays = [array for arrays in self._every_array for array in arrays if array.size]
        bounds = [bounds_of(self._launcher, array) for array in arrays]
        starts, ends = zip(*bounds, strict=True) if bounds else ((), ())
        return np.array(starts, np.int64), np.array(ends, np.int64)

    def begin(
        self,
        rule: UpdateRule,
        gradients: Sequence[Any],
        version: int | None,
        scalars: Sequence[Scalars],
        record: StepRecord,
        refused: Any,
        stream: Hashable,
    ) -> tuple[DenseLaunch, Sequence[Any]]:
        """Fills the stand-ins, and takes out the current stream's launch, to be given to `end`.

        The arguments are those of `Backend.apply_dense`; kernels read the flag `refused`.

        Returns:
            (the launch, arrays to keep until it is enqueued).
        """
        if self.has_stand_ins:
            self.fill_stand_ins()
        given = {"sums": record.sums[id(self)]} if id(self) in record.sums else {}
        key = stream, rule, bool(given), gradients[0].dtype
        update = self._launches.pop(key, None)
        if update is None:
            has_groups, storage = self._has_groups(rule), storage_of(self.codecs, key[-1])
            arguments = ScalarArguments(self._launcher, rule, storage, has_groups)
            given |= arguments.of(scalars, record)
            launch = self._bind(rule, storage, given, refused)
            update = DenseLaunch(self._launcher, launch, arguments, key)
        else:
            update.launch.replace(**update.scalars.of(scalars, record), **given, refused=refused)
        if update.point_to_version(version):
            return update, gradients
        ours = [gradients[i] for i in self._positions]
        for position in self._launcher.strided(ours):
            ours[position] = self._launcher.xp.ascontiguousarray(ours[position])
            version = None
        addresses = self._launcher.addresses(ours)
        if update.point_to_addresses(addresses, version):
            return update, ours
        item_bytes = ours[0].dtype.itemsize
        is_as_wide = item_bytes == self.codecs.var.dtypes[0].itemsize
        for position in self._written.overlaps(addresses, self._sizes * item_bytes, is_as_wide):
            ours[position] = ours[position].copy()
            addresses[position] = self._launcher.address(ours[position])
            version = None
        update.add(addresses, version)
        return update, ours

    def fill_stand_ins(self) -> None:
        """Copies arrays that are not contiguous to their stand-ins, before an update."""
        for array, stand_in in self._stand_ins:
            stand_in[...] = array

    def writes_to(self, address: int, num_bytes: int) -> bool:
        """Whether an update writes to some of this memory."""
        end = address + num_bytes
        return any(address < there and here < end for here, there in self._written_spans)

    def end(self, update: DenseLaunch) -> None:
        """Keeps a launch for the next step, and copies the stand-ins back."""
        if len(self._launches) == MOST_STREAMS and update.key not in self._launches:
            del self._launches[next(iter(self._launches))]
        self._launches[update.key] = update
        if self.has_stand_ins:
            self.copy_stand_ins_back()

    def copy_stand_ins_back(self) -> None:
        """Copies stand-ins to the arrays that they stand in for, after an update."""
        for array, stand_in in self._stand_ins:
            array[...] = stand_in

    def _contiguous(self, array: Any) -> Any:
        if array.flags.c_contiguous:
            return array
        stand_in = self._launcher.xp.empty(array.shape, dtype=array.dtype)
        self._stand_ins.append((array, stand_in))
        return stand_in

    def _sizes_and_pack(self) -> tuple[np.ndarray[Any, Any], int]:
        """Returns the sizes that chunks are cut from, and how many elements a thread updates."""
        widest = max(self.codecs.var.dtypes[0].itemsize, slot_dtype(self.codecs).itemsize)
        return self._sizes, PACK_BYTES // widest

    def _has_groups(self, rule: UpdateRule) -> bool:
        """Whether a rule's launch is for groups, if only one: some have no other form."""
        return self._groups is not None or kernels.needs_groups(rule)

    def _bind(
        self, rule: UpdateRule, storage: Storage, scalars: dict[str, Any], refused: Any
    ) -> Launch | SummedLaunch:
        arguments, is_given_sums = self._arguments(rule, refused), "sums" in scalars
        if rule.sums and not is_given_sums:
            forms = kernels.sum_terms(rule, storage), kernels.dense_update(rule, storage, True)
            return self._bind_summed(rule, storage, scalars, forms, arguments)
        has_groups = self._has_groups(rule)
        if has_groups:
            arguments["groups"] = to_device(self._launcher, self._groups_or_zeros())
        if rule.row_slots:
            widths = np.array([math.prod(self._shapes[i][1:]) for i in self._positions], np.int64)
            arguments["widths"] = to_device(self._launcher, widths)
        kernel = kernels.dense_update(rule, storage, has_groups, is_given_sums)
        return self._launcher.bind(kernel, *self._shape(), **scalars, **arguments)

    def _bind_summed(
        self,
        rule: UpdateRule,
        storage: Storage,
        scalars: dict[str, Any],
        forms: tuple[Kernel, Kernel],
        arguments: dict[str, Any],
    ) -> SummedLaunch:
        """Returns the launches of a rule with sums; see `SummedLaunch`."""
        of_chunks = self._chunks[:, Chunk._fields.index("variable")]
        shape, groups = self._shape(), self._groups_or_zeros()
        return SummedLaunch(
            self._launcher, rule, shape, of_chunks, groups, storage, scalars, forms, **arguments
        )

    def _shape(self) -> tuple[int, int]:
        """Returns how many blocks go through the chunks, and how many threads they have."""
        most = self._launcher.num_multiprocessors
        return dense_blocks(len(self._chunks), self._num_threads, most), self._num_threads

    def _arguments(self, rule: UpdateRule, refused: Any) -> dict[str, Any]:
        """Returns a kernel's arguments, but for what has to do with scalars.

        For each stream, as a kernel of this one must not read a table before its upload is done.
        """
        chunks = self._chunks
        if kernels.has_factors(rule) and not rule.sums:
            # From the last one: its gradients were measured last, and may still be in the cache.
            chunks = chunks[::-1]
        return {
            "variables": to_device(self._launcher, self._table()),
            "num_variables": self.num_variables,
            "chunks": to_device(self._launcher, np.ascontiguousarray(chunks)),
            "num_chunks": len(self._chunks),
            "chunk_size": self._chunk_size,
            "few_grads": FewGradients([0] * FEW_GRADIENTS),
            "refused": refused,
        }

    def _table(self) -> np.ndarray[Any, Any]:
        """Returns what kernels read of each variable."""
        return np.column_stack((self._sizes, self._first_numbers(), self._addresses))

    def _first_numbers(self) -> np.ndarray[Any, Any]:
        return np.array([self.targets[i].first_number for i in self._positions], np.int64)

    def _groups_or_zeros(self) -> np.ndarray[Any, Any]:
        return np.zeros_like(self._sizes) if self._groups is None else self._groups


class _Memory:
    """Ranges of memory.

    Args:
        starts: int64 [num_variables, num_arrays], addresses.
        sizes: int64 [num_variables, num_arrays], in bytes.
    """

    def __init__(self, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> None:
        self._starts = np.sort(starts, axis=None)
        self._ends = np.sort(starts + sizes, axis=None)
        # An element's gradient may be the variable's own element: it is read before it is written.
        self._own = starts[:, 0].copy()

    def overlaps(
        self, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], is_as_wide: bool
    ) -> list[int]:
        """Returns which of other ranges overlap these, unless they are a variable's own.

        Sizes are in bytes; `is_as_wide` is whether elements there are as wide as those of
        variables.
        """
        overlap = _overlap(self._starts, self._ends, starts, starts + sizes)
        return np.flatnonzero(overlap & ((starts != self._own) | (not is_as_wide))).tolist()


def _overlap(
    written_starts: np.ndarray[Any, Any],
    written_ends: np.ndarray[Any, Any],
    starts: np.ndarray[Any, Any],
    ends: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Returns which ranges overlap a written one; written starts and ends are ascending."""
    # More written ones begin before the end than end at or before the start.
    num_begun = np.searchsorted(written_starts, ends, "left")
    return (num_begun > np.searchsorted(written_ends, starts, "right")) & (starts < ends)


def _chunks(sizes: np.ndarray[Any, Any], chunk_size: int) -> np.ndarray[Any, Any]:
    """Cuts variables into chunks: uint32 [num_chunks, fields of Chunk]."""
    parts = -(-sizes // chunk_size)
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
    return np.flatnonzero(_overlap(written_starts, written_ends, starts, ends)).tolist()


def bounds_of(launcher: Launcher, array: Any) -> tuple[int, int]:
    """Returns the first address of an array, and the one after its last."""
    return byte_bounds(array_at(launcher.address(array), array))


class CodedPlan(DensePlan):
    """The tables of one set of variables whose slots are in 8 bits; see `DensePlan`.

    A variable whose blocks do not end at rows is one row.
    """

    def _sizes_and_pack(self) -> tuple[np.ndarray[Any, Any], int]:
        # Of the lanes that share blocks: where these are short, some elements are not there.
        widths, per_block = self._widths(), self.codecs.per_block
        lanes = np.array([lanes_per_block(each, per_block) for each in widths.tolist()], np.int64)
        return self._sizes // widths * -(-widths // per_block) * lanes * LANE_CODES, LANE_CODES

    def _has_groups(self, rule: UpdateRule) -> bool:
        return True

    def _table(self) -> np.ndarray[Any, Any]:
        numbers = self._first_numbers()
        return np.column_stack((self._sizes, self._widths(), numbers, self._addresses))

    def _widths(self) -> np.ndarray[Any, Any]:
        """Returns how many elements lie between the ends of rows, of each variable."""
        every = [self.targets[i] for i in self._positions]
        ends_at_rows = [target.slots[-1].ndim == 2 for target in every]
        shapes = [target.var.shape for target in every]
        widths = [
            math.prod(shape[1:] if ends else shape)
            for shape, ends in zip(shapes, ends_at_rows, strict=True)
        ]
        return np.array(widths, np.int64)

    def _bind(
        self, rule: UpdateRule, storage: Storage, scalars: dict[str, Any], refused: Any
    ) -> Launch | SummedLaunch:
        arguments = self._arguments(rule, refused)
        update = kernels.coded_update(rule, self.codecs.coded, storage)
        if rule.sums:
            forms = kernels.sum_coded_terms(rule, self.codecs.coded, storage), update
            return self._bind_summed(rule, storage, scalars, forms, arguments)
        arguments["groups"] = to_device(self._launcher, self._groups_or_zeros())
        return self._launcher.bind(update, *self._shape(), **scalars, **arguments)
