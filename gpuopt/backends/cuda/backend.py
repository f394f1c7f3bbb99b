"""Updates on one GPU, by kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from gpuopt.backends.backend import (
    RowCopy,
    Scalars,
    SparseUpdate,
    Target,
    Updated,
    codecs_of,
    compute_type,
)
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.clips import Clips
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.catch_up import CountOfSteps, bring_up, readable
from gpuopt.backends.cuda.clips import CudaClips
from gpuopt.backends.cuda.dense_plan import CodedPlan, DensePlan, overlapping
from gpuopt.backends.cuda.launch_shapes import (
    ROW_THREADS,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher, LaunchSequence, wait_for_event
from gpuopt.backends.cuda.loss_scaling import CudaLossScalings
from gpuopt.backends.cuda.norms import CudaNorms
from gpuopt.backends.cuda.order import LastUpdate, UpdateOrder
from gpuopt.backends.cuda.page_locked import Landings
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.row_copies import copy_rows
from gpuopt.backends.cuda.row_flags import CudaRowFlags
from gpuopt.backends.cuda.sorted_rows import Table, add_pieces, add_sort
from gpuopt.backends.cuda.sparse_launches import SparseLaunches, kind_of
from gpuopt.backends.cuda.structs import TableGradient
from gpuopt.backends.cuda.workspace import Workspace, Workspaces
from gpuopt.backends.foreign import array_of_foreign
from gpuopt.backends.loss_scaling import LossScalings
from gpuopt.backends.memory_owner import Owner, array_at
from gpuopt.backends.norms import Norms
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.backends.row_order import MAX_ROWS, together
from gpuopt.codecs import Codecs
from gpuopt.device import Device
from gpuopt.errors import DeadlineExceededError
from gpuopt.locks import Lock
from gpuopt.rules.update_rule import UpdateRule

# Of `measure_copy`: at least this, and as much as the cache, twice which is copied then.
_COPIED_BYTES = 64 * 2**20
_COPIES = 5


class CudaBackend:
    """A GPU's backend; see `Backend` for what each method promises.

    Work goes to the device's current stream. Threads may share a backend: a lock lets one at a time
    enqueue an update, or a check of rows.
    """

    most_rows: int | None = MAX_ROWS - 1

    def __init__(self, device: Device, launcher: Launcher) -> None:
        self.device = device
        self.xp = launcher.xp
        self.profiling_range = launcher.profiling_range
        self._launcher = launcher
        self._lock = Lock(f"the updates on {device}")
        self.locks: Sequence[Lock] = (self._lock,)
        self._order = UpdateOrder(launcher)
        self._workspaces = Workspaces(launcher)
        self.row_flags = CudaRowFlags(launcher, self._lock, self._order, self._workspaces)
        self.norms: Norms = CudaNorms(launcher)
        scalings = CudaLossScalings(launcher, self._lock, self._order)
        self.loss_scalings: LossScalings = scalings
        self.clips: Clips = CudaClips(
            launcher, self._lock, self._order, self._workspaces, scalings, self._flag_array
        )
        self._why_no_reads: str | None = None
        self._unset_flag = self.row_flags.new()
        with launcher.device():
            # Kernels of all streams read it, and none waits for its stream.
            wait_for_event(launcher.record(), f"{device}, whose first memory is being filled")

    def enter(self, *read: Updated) -> AbstractContextManager[Any]:
        with self._launcher.device():
            self._order.follow(read)
        # CuPy's own: Ctrl-C in one that is written in Python may leave its device the current one.
        return self._launcher.device()

    @contextmanager
    def enter_reading(self, *read: Updated, kept: Sequence[Any] = ()) -> Iterator[None]:
        with self._launcher.device():
            self.refuse_capture("what reads, updates or makes variables")
            self._order.follow(read)
            try:
                yield
            finally:
                with self._lock:
                    self._order.end_reading(read, kept)

    @contextmanager
    def enter_update(self, *updated: Updated, kept: Sequence[Any] = ()) -> Iterator[None]:
        with self._launcher.device():
            self.refuse_capture("what reads, updates or makes variables")
            with self._lock:
                last = self._order.begin(updated)
            try:
                yield
            finally:
                with self._lock:
                    self._order.put_last(last, updated)
                    self._order.end(last, kept)

    def note_reading(self, *read: Updated, kept: Sequence[Any] = ()) -> None:
        with self._lock, self._launcher.device():
            # A capture reads when its graph is launched, which gpuopt cannot order.
            if self._order.has_several_streams() and not self._launcher.is_capturing():
                self._order.end_reading(read, kept)

    def hold(self, *arrays: Any) -> None:
        with self._lock, self._launcher.device():
            self._order.hold(arrays)

    def refuse_capture(self, call: str = "apply_gradients") -> None:
        if self._launcher.is_capturing():
            raise RuntimeError(
                f"the current stream of {self.device} is being captured into a CUDA graph, which "
                "would repeat this call's numbers and addresses for ever, in no order with other "
                f"streams: call {call} outside of the capture"
            )

    def refuse_reads(self, why: str | None) -> None:
        self._why_no_reads = why

    def record_creation(self, new: Updated) -> None:
        with self._lock, self._launcher.device():
            self._order.record_creation(new)

    def as_array(self, value: Any) -> Any:
        if isinstance(value, self.xp.ndarray):
            return value
        with self.enter():
            return array_of_foreign(value, self.xp.from_dlpack)

    def plain_array(self, value: Any) -> Any:
        return value if isinstance(value, self.xp.ndarray) else None

    def layout(self, array: Any) -> np.ndarray[Any, Any]:
        return array_at(self._launcher.address(array), array)

    def unowned(self, array: Any) -> Any:
        return self._launcher.unowned(array)

    def memory_owner(self, array: Any, address: int) -> Owner:
        return self._launcher.memory_owner(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with self.enter():
            self.refuse_capture("what reads, updates or makes variables")
            return self.xp.empty(shape, dtype=dtype)

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Any:
        with self.enter():
            self.refuse_capture("what reads, updates or makes variables")
            storage = self.xp.empty(shape, dtype=dtype)
            if not storage.size:
                return storage
            if isinstance(value, self.xp.ndarray):
                storage[...] = value
                self.hold(value)
                return storage
            host = np.asarray(value).astype(dtype)
            if host.shape == shape:
                self._launcher.upload(storage, host)
            else:  # as integers of the same bits, because not every CuPy fills with other dtypes
                bits = np.dtype(f"u{host.itemsize}")
                storage.view(bits).fill(host.view(bits)[()])
            return storage

    def to_host(self, array: Any, *, even_if_refused: bool = False) -> np.ndarray[Any, Any]:
        with self.enter():
            wait_for_event(self._launcher.record(), f"{self.device}, from which values are read")
            if not even_if_refused:
                self._check_reads()
            return self.xp.asnumpy(array)  # type: ignore[no-any-return]

    def overwrite(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        with self.enter():
            if not array.flags.c_contiguous:
                array[...] = self.from_host(values)
            elif array.size:
                self._launcher.upload(array, values)

    def stage(self, array: Any) -> np.ndarray[Any, Any]:
        with self.enter():
            if not array.size:
                return np.empty(array.shape, array.dtype)
            landing = self._launcher.download(self.xp.ascontiguousarray(array))
            try:
                landing.wait(f"{self.device}, from which a message is read")
            except BaseException:
                with self._lock:
                    self._order.in_flight.hold(landing.event, landing)
                raise
            self._check_reads()
            staged = landing.values.reshape(array.shape)
            # Small copies share memory, which is used again once the landing is gone.
            return staged.copy() if staged.nbytes <= Landings.SIZE else staged

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        with self.enter():
            copy = self.xp.empty(array.shape, dtype=array.dtype)
            if copy.size:
                self._launcher.upload(copy, array)
            return copy

    def from_peer(self, array: Any, peer: CudaBackend) -> Any:
        with peer.enter():
            is_of_this_stream = peer._order.has_one_stream()
        with self.enter():
            copy = self._launcher.copy_of_peer(array)
            if not is_of_this_stream:
                with self._lock:
                    self._order.in_flight.hold(self._launcher.record(), array)
            return copy

    def plan_dense(
        self,
        targets: Sequence[Target],
        codecs: Codecs | None = None,
        updated: Sequence[Updated] = (),
        borrowed: Sequence[int] = (),
        groups: Sequence[int] | None = None,
    ) -> DensePlan:
        targets = list(targets)
        codecs = codecs or codecs_of(targets[0])
        for position in borrowed:
            target = targets[position]
            targets[position] = target._replace(var=self.unowned(target.var))
        form = CodedPlan if codecs.per_block else DensePlan
        with self.enter():
            plan = form(self._launcher, targets, codecs, updated, groups)
        if plan.new_memory is not None:
            self.record_creation(plan.new_memory)
        return plan

    def overlapping(self, plans: Sequence[DensePlan], arrays: Sequence[Any]) -> list[int]:
        return overlapping(self._launcher, plans, arrays)

    def apply_dense(
        self,
        rule: UpdateRule,
        plan: DensePlan,
        gradients: Sequence[Any],
        scalars: Sequence[Scalars],
        *,
        record: StepRecord = NOTHING_KNOWN,
        version: int | None = None,
        read: Sequence[Updated] = (),
        kept: Sequence[Any] = (),
    ) -> None:
        if plan.num_variables == 0:
            return
        if record.refused is not None:
            read = (*read, record.refused)
        with self._lock, self._launcher.device():
            last = plan.last_update = self._order.begin(plan.updated, plan.last_update, read)
            used: Sequence[Any] = ()
            try:
                given = scalars, record, self._flag_array(record.refused), last.stream
                update, used = plan.begin(rule, gradients, version, *given)
                update.launch.start()
                plan.end(update)
            finally:
                self._order.end(last, (plan.memory, gradients, used, record, kept), read)

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
        plans = [each.plan for each in updates if each.plan.num_variables]
        if not plans:
            return
        flags = () if record.refused is None else (record.refused,)
        # Copies of gradients are made on the current stream, which gets their memory back.
        gradients = [each[1:3] for each in updates]
        used: list[Any] = [[plan.memory for plan in plans], gradients, record, kept]
        with self._lock, self._launcher.device():
            last = self._begin(plans, flags)
            try:
                by_width: dict[int, list[Table]] = {}
                for update in updates:
                    plan = update.plan
                    if plan.num_variables:
                        if plan.has_stand_ins:
                            plan.fill_stand_ins()
                        table = self._table(update)
                        by_width.setdefault(plan.width, []).append(table)
                        if update.catch_up is not None:
                            used.append(update.catch_up.on_device.arrays)
                            # Before: it is at least as many as kernels count.
                            update.catch_up.now += 1
                is_alone = len(updates) == 1
                check = (
                    self.row_flags.take(flags[0], updates[0].rows) if flags and is_alone else None
                )
                given = scalars, record, self._flag_array(record.refused)
                codecs = plans[0].codecs
                workspace = self._workspaces.take(last.stream)
                for width, tables in by_width.items():
                    for some in together(tables) if len(tables) > 1 else (tables,):
                        how = other_rows, check is not None
                        kind = kind_of(rule, codecs, width, some, *how)
                        prepare = partial(
                            SparseLaunches, self._launcher, workspace, kind, some, *given
                        )
                        number = 0 if check is None else check.number
                        workspace.prepared(kind, prepare).start(some, *given, number)
                self._workspaces.put_back(workspace)
                for plan in plans:
                    if plan.has_stand_ins:
                        plan.copy_stand_ins_back()
            finally:
                self._order.end(last, used, flags)

    def bring_up_rows(self, plan: DensePlan, catch_up: CatchUp, rows: Any = None) -> None:
        count: CountOfSteps | None = catch_up.on_device
        if count is None or not plan.num_variables:
            return
        with self._lock, self._launcher.device():
            if self._launcher.is_capturing():
                raise RuntimeError(
                    "a table has rows that missed steps, which a capture into a CUDA graph would "
                    "make again with each launch: read it before, or call flush()"
                )
            given = None if rows is None else readable(self._launcher, rows)
            if given is not None and not given.size:
                return
            last = self._order.begin(plan.updated, plan.last_update, is_step=False)
            plan.last_update = last
            try:
                plan.fill_stand_ins()
                workspace = self._workspaces.take(last.stream)
                bring_up(self._launcher, workspace, plan, catch_up, given)
                self._workspaces.put_back(workspace)
                plan.copy_stand_ins_back()
            finally:
                self._order.end(last, (plan.memory, count.arrays, given, rows))

    def measure_copy(self) -> float:
        with self.enter():
            num_elements = max(_COPIED_BYTES, self._launcher.cache_bytes) // 4
            source = self.xp.ones(num_elements, np.float32)
            target = self.xp.zeros(num_elements, np.float32)
            # Started one after the other, so that the GPU does not wait for the host between them.
            copies = [
                self._launcher.timed(lambda: self.xp.copyto(target, source)) for _ in range(_COPIES)
            ]
            best = min(read_ms() for read_ms in copies)
            return float(2 * source.nbytes / best * 1e3)

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        with self.enter():
            copy_rows(self._launcher, copies)

    def true_positions(self, mask: Any) -> Any:
        with self.enter():
            return self._true_positions(mask)

    def sum_duplicate_rows(self, values: Any, indices: Any) -> tuple[Any, Any]:
        real = np.dtype(compute_type(values.dtype))
        if not indices.size or not values.size:
            return values.astype(real), indices
        with self.enter(), self._lock:
            try:
                workspace = self._workspaces.take(self._launcher.stream())
                sums = self._sum_duplicate_rows(
                    workspace,
                    self.xp.ascontiguousarray(values),
                    self.xp.ascontiguousarray(indices),
                    real,
                )
                self._workspaces.put_back(workspace)
                return sums
            finally:
                self._order.hold((values, indices))

    def _sum_duplicate_rows(
        self, workspace: Workspace, values: Any, indices: Any, real: np.dtype[Any]
    ) -> tuple[Any, Any]:
        width = math.prod(values.shape[1:])
        height = self._read_number(indices.max(keepdims=True)) + 1
        sequence, flag = LaunchSequence(), self._unset_flag.array
        rows = add_sort(sequence, self._launcher, workspace, indices, height, flag)
        gradients = {
            "only_gradient": TableGradient(0, self._launcher.address(values), 0),
            "num_tables": 1,
        }
        parts = add_pieces(
            sequence, self._launcher, workspace, rows, values.dtype, width, gradients, flag
        )
        sequence.start(indices)
        begins = self._begins_of_runs(rows.keys)
        sums = self.xp.empty((begins.size, *values.shape[1:]), dtype=real)
        lanes = lanes_per_row(width, 1)
        self._launcher.launch(
            kernels.sum_runs(name_of(values.dtype), name_of(rows.keys.dtype)),
            num_blocks(begins.size * lanes, ROW_THREADS, self._launcher.num_multiprocessors),
            ROW_THREADS,
            grad=values,
            rows=rows,
            begins=begins,
            num_runs=begins.size,
            parts=parts,
            row_width=width,
            sums=sums,
            lanes_per_row=lanes,
        )
        first = rows.positions[begins]
        order = self.xp.argsort(first)
        return sums[order], indices[first[order]]

    def _begin(self, plans: Sequence[DensePlan], read: Sequence[Updated]) -> LastUpdate:
        """Begins an update of all variables of these plans, which share its record from now on."""
        updated = [identity for plan in plans for identity in plan.updated]
        lasts = {plan.last_update for plan in plans}
        last = self._order.begin(updated, lasts.pop() if len(lasts) == 1 else None, read)
        for plan in plans:
            plan.last_update = last
        return last

    def _table(self, update: SparseUpdate) -> Table:
        """Returns a table for kernels; the gradient is copied if the update would overwrite it."""
        plan, catch_up = update.plan, update.catch_up
        values = self.xp.ascontiguousarray(update.values)
        rows = self.xp.ascontiguousarray(update.rows)
        if plan.writes_to(self._launcher.address(values), values.nbytes):
            values = values.copy()
        count: CountOfSteps | None = None
        if catch_up is not None:
            self._order.follow((catch_up,))
            if catch_up.on_device is None:
                real = compute_type(plan.dtype)
                catch_up.on_device = CountOfSteps(self._launcher, catch_up, real)
            count = catch_up.on_device
        first_number = plan.targets[0].first_number
        return Table(plan.addresses, plan.height, values, rows, update.group, count, first_number)

    def _begins_of_runs(self, keys: Any) -> Any:
        """Returns where runs of equal keys begin, int64; the host waits for them."""
        is_first = self.xp.ones(keys.size, bool)
        is_first[1:] = keys[1:] != keys[:-1]
        return self._true_positions(is_first)

    def _true_positions(self, mask: Any) -> Any:
        # CuPy would wait for their number, and not let Ctrl-C through.
        wait_for_event(self._launcher.record(), f"{self.device}, which looks for rows")
        return self.xp.flatnonzero(mask)

    def _read_number(self, array: Any) -> int:
        """Returns an array's one number; the host waits for it."""
        found = self._launcher.download(array)
        found.wait(f"{self.device}, from which a number is read")
        return int(found.values.item())

    def _check_reads(self) -> None:
        # After the wait, which may have ended because work was given up.
        if self._why_no_reads is not None:
            raise DeadlineExceededError(
                f"{self._why_no_reads}, so that what {self.device} has computed since is not to be "
                "read: restore all variables from a checkpoint"
            )

    def _flag_array(self, refused: Any) -> Any:
        flag = self._unset_flag if refused is None else refused
        if flag.unchecked is not None:
            self.row_flags.settle(flag)
        return flag.array
