"""Updates in host memory, by numpy and by compiled rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import setitem
from time import perf_counter
from typing import Any

import numpy as np

from gpuopt.backends import launch_observer
from gpuopt.backends.backend import (
    RowCopy,
    RowFlags,
    Scalars,
    SparseUpdate,
    Target,
    Updated,
    codecs_of,
)
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.clips import Clips
from gpuopt.backends.cpu.catch_up import bring_up
from gpuopt.backends.cpu.clips import CpuClips, CpuNorms
from gpuopt.backends.cpu.cores import read_cache_bytes
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.dense_update import update_dense
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import WrittenMemory, empty
from gpuopt.backends.cpu.sparse_update import (
    sum_duplicate_rows,
    update_all_rows,
    update_late_rows,
    update_touched_rows,
)
from gpuopt.backends.foreign import array_of_foreign, is_foreign
from gpuopt.backends.loss_scaling import LossScalings
from gpuopt.backends.memory_owner import Owner, array_at, owner_of
from gpuopt.backends.norms import Norms
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.backends.row_order import TableOfWidth, first_positions
from gpuopt.codecs import Codecs
from gpuopt.device import Device
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.interrupts import at_once
from gpuopt.locks import Lock
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

_DEFAULT_LIMITS = CpuLimits()
# Of `measure_copy`: at least this, and as much as the largest cache, twice which is copied then.
_COPIED_BYTES = 64 * 2**20
_COPIES = 5
_nothing = nullcontext()


class CpuBackend:
    """The CPU's backend; see `Backend` for what each method promises.

    Args:
        limits: The sizes that decide how an update is computed.
    """

    xp: Any = np
    device = Device.cpu

    locks: Sequence[Lock] = ()
    row_flags: RowFlags | None = None
    loss_scalings: LossScalings | None = None
    most_rows: int | None = None

    def __init__(self, limits: CpuLimits = _DEFAULT_LIMITS) -> None:
        self._limits = limits
        self.norms: Norms = CpuNorms(limits)
        self.clips: Clips = CpuClips(limits)

    def enter(self, *read: Updated) -> AbstractContextManager[Any]:
        return _nothing

    def enter_reading(
        self, *read: Updated, kept: Sequence[Any] = ()
    ) -> AbstractContextManager[Any]:
        return _nothing

    def enter_update(
        self, *updated: Updated, kept: Sequence[Any] = ()
    ) -> AbstractContextManager[Any]:
        return _nothing

    def note_reading(self, *read: Updated, kept: Sequence[Any] = ()) -> None:
        pass

    def hold(self, *arrays: Any) -> None:
        pass

    def refuse_capture(self, call: str = "apply_gradients") -> None:
        pass

    def refuse_reads(self, why: str | None) -> None:
        pass

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        return _nothing

    def record_creation(self, new: Updated) -> None:
        pass

    def as_array(self, value: Any) -> Array:
        if is_foreign(value):
            array: Array = array_of_foreign(value, np.from_dlpack)
            return array
        return np.asarray(value)

    def plain_array(self, value: Any) -> Array | None:
        # An update of a masked array's values would ignore its mask.
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            return None
        return value.view(np.ndarray) if type(value) is not np.ndarray else value

    def layout(self, array: Array) -> Array:
        return array

    def unowned(self, array: Array) -> Array:
        return array_at(array.ctypes.data, array)

    def memory_owner(self, array: Array, address: int) -> Owner:
        return owner_of(array, address)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return empty(shape, dtype)

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
        storage = empty(shape, dtype)
        storage[...] = value
        return storage

    def to_host(self, array: Array, *, even_if_refused: bool = False) -> Array:
        return array.copy()

    def overwrite(self, array: Array, values: Array) -> None:
        array[...] = values

    def stage(self, array: Array) -> Array:
        # Unlike ascontiguousarray, this keeps the shape ().
        return np.asarray(array, order="C")

    def from_host(self, array: Array) -> Array:
        return array.copy()

    def from_peer(self, array: Array, peer: Any) -> Array:
        raise TypeError("the host is no GPU's peer")

    def plan_dense(
        self,
        targets: Sequence[Target],
        codecs: Codecs | None = None,
        updated: Sequence[Updated] = (),
        borrowed: Sequence[int] = (),
        groups: Sequence[int] | None = None,
    ) -> DensePlan:
        # From the caller's arrays: those that replace them below do not know their memory's owner.
        memory = WrittenMemory([array for target in targets for array in target.arrays])
        targets = list(targets)
        for position in borrowed:
            target = targets[position]
            targets[position] = target._replace(var=self.unowned(target.var))
        return DensePlan(targets, memory, self._limits, groups, codecs or codecs_of(targets[0]))

    def overlapping(self, plans: Sequence[DensePlan], arrays: Sequence[Array]) -> list[int]:
        overlaps = WrittenMemory.joined([plan.memory for plan in plans]).overlaps
        return [position for position, array in enumerate(arrays) if overlaps(array)]

    def apply_dense(
        self,
        rule: UpdateRule,
        plan: DensePlan,
        gradients: Sequence[Array],
        scalars: Sequence[Scalars],
        *,
        record: StepRecord = NOTHING_KNOWN,
        version: int | None = None,
        read: Sequence[Updated] = (),
        kept: Sequence[Any] = (),
    ) -> None:
        observer = launch_observer.this_thread.observer
        begin = 0.0 if observer is None else perf_counter()
        update_dense(rule, plan, gradients, scalars, self._limits)
        if observer is not None:
            _note_launch(observer, f"dense {rule.name}", begin)

    def apply_sparse(
        self,
        rule: UpdateRule,
        updates: Sequence[SparseUpdate],
        scalars: Sequence[Scalars],
        *,
        other_rows: UpdateRule | None,
        record: StepRecord = NOTHING_KNOWN,
        kept: Sequence[Any] = (),
    ) -> None:
        observer = launch_observer.this_thread.observer
        begin = 0.0 if observer is None else perf_counter()
        for update, first in zip(updates, _first_positions(updates), strict=True):
            plan, values, rows, group, catch_up = update
            given = plan, values, rows, scalars[group]
            if other_rows is not None:
                ignore_fp_warnings(update_all_rows, rule, other_rows, *given, self._limits, first)
            elif catch_up is not None:
                ignore_fp_warnings(update_late_rows, rule, *given, catch_up, self._limits, first)
            elif values.size:
                ignore_fp_warnings(update_touched_rows, rule, *given, self._limits, first)
        if observer is not None:
            _note_launch(observer, f"sparse {rule.name}", begin)

    def bring_up_rows(self, plan: DensePlan, catch_up: CatchUp, rows: Array | None = None) -> None:
        rows = None if rows is None else np.asarray(rows).reshape(-1)
        ignore_fp_warnings(bring_up, plan, catch_up, rows, self._limits)

    def measure_copy(self) -> float:
        num_bytes = max(_COPIED_BYTES, read_cache_bytes())
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        best = np.inf
        for _ in range(_COPIES):
            begin = perf_counter()
            np.copyto(target, source)
            best = min(best, perf_counter() - begin)
        return 2 * num_bytes / best

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        at_once(list(map(_prepared_copy, copies)))

    def true_positions(self, mask: Array) -> Array:
        return np.flatnonzero(mask)

    def sum_duplicate_rows(self, values: Array, indices: Array) -> tuple[Array, Array]:
        return sum_duplicate_rows(values, indices, self._limits)


def _first_positions(updates: Sequence[SparseUpdate]) -> list[int]:
    """Returns the sorted position of each table's first row; see `gpuopt.backends.row_order`."""
    if len(updates) == 1:
        return [0]
    tables: list[TableOfWidth] = []
    for plan, _, rows, *_ in updates:
        [(var, *_)] = plan.targets
        # An empty table has no rows to sort, whatever its gradient names.
        height = len(var) if var.size else 0
        width = var.size // max(height, 1)
        tables.append(TableOfWidth(width, height, rows if var.size else rows[:0]))
    return first_positions(tables)


def _prepared_copy(copy: RowCopy) -> Callable[[], Any]:
    target, source, from_rows, to_rows = copy
    if to_rows is None and from_rows is not None:
        # "clip" writes to the target itself, and "raise" to a copy of it.
        return partial(source.take, from_rows, 0, target, "clip")
    rows = ... if to_rows is None else to_rows
    return partial(setitem, target, rows, source if from_rows is None else source[from_rows])


def _note_launch(observer: launch_observer.LaunchObserver, name: str, begin: float) -> None:
    ms = (perf_counter() - begin) * 1e3
    observer.note_launch("cpu", name, lambda: ms)
