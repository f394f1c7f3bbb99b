"""Updates on one GPU, by kernels."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target, Updated, compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.dense_plan import DensePlan, overlapping
from gpuopt.backends.cuda.launch_shapes import (
    DENSE_CHUNK,
    DENSE_THREADS,
    LONG_RUN,
    PACK_BYTES,
    PIECE,
    ROW_THREADS,
    ROWS_PER_WORD,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher, wait_for_event
from gpuopt.backends.cuda.order import MOST_STREAMS, UpdateOrder
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.row_flags import CudaRowFlags
from gpuopt.backends.cuda.sorted_rows import MAX_ROWS, sort_rows
from gpuopt.backends.cuda.structs import SortedRows
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.backends.memory_owner import Owner
from gpuopt.backends.unowned import array_at
from gpuopt.device import Device
from gpuopt.locks import Lock
from gpuopt.rules.update_rule import UpdateRule


class CudaBackend:
    """A GPU's backend; see `Backend` for what each method promises.

    Work goes to the device's current stream. Threads may share a backend: a lock lets one at a time
    enqueue an update.
    """

    most_rows: int | None = MAX_ROWS - 1

    def __init__(self, device: Device, launcher: Launcher) -> None:
        self.device = device
        self.xp = launcher.xp
        self._launcher = launcher
        self._lock = Lock(f"the updates on {device}")
        self._order = UpdateOrder(launcher)
        self._workspaces: dict[Hashable, Workspace] = {}
        self.row_flags = CudaRowFlags(launcher)
        self._unset_flag = self.row_flags.new()
        with launcher.device():
            # Kernels of all streams read it, and none waits for its stream.
            wait_for_event(launcher.record(), f"{device}, whose first memory is being filled")

    @contextmanager
    def enter(self, *read: Updated) -> Iterator[None]:
        with self._launcher.device():
            self._order.follow(read)
            yield

    @contextmanager
    def enter_reading(self, *read: Updated, kept: Sequence[Any] = ()) -> Iterator[None]:
        with self._launcher.device():
            self._order.follow(read)
            try:
                yield
            finally:
                with self._lock:
                    self._order.end_reading(read, kept)

    @contextmanager
    def enter_update(self, *updated: Updated, kept: Sequence[Any] = ()) -> Iterator[None]:
        with self._launcher.device():
            with self._lock:
                last = self._order.begin(updated)
            try:
                yield
            finally:
                with self._lock:
                    self._order.end(last, kept)

    def hold(self, *arrays: Any) -> None:
        with self._lock, self._launcher.device():
            self._order.hold(arrays)

    def refuse_capture(self) -> None:
        with self._launcher.device():
            if self._launcher.is_capturing():
                raise RuntimeError(
                    f"the current stream of {self.device} is being captured into a CUDA graph, "
                    "which would repeat this step's numbers and addresses for ever: call "
                    "apply_gradients outside of the capture"
                )

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        return self._launcher.profiling_range(name)

    def record_creation(self, new: Updated) -> None:
        with self._lock, self._launcher.device():
            self._order.record_creation(new)

    def as_array(self, value: Any) -> Any:
        if isinstance(value, self.xp.ndarray):
            return value
        with self.enter():
            return self.xp.from_dlpack(value)

    def plain_array(self, value: Any) -> Any:
        return value if isinstance(value, self.xp.ndarray) else None

    def layout(self, array: Any) -> np.ndarray[Any, Any]:
        return array_at(self._launcher.address(array), array)

    def unowned(self, array: Any) -> Any:
        return self._launcher.unowned(array)

    def memory_owner(self, array: Any, address: int) -> Owner:
        return self._launcher.memory_owner(array)

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Any:
        with self.enter():
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

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        with self.enter():
            wait_for_event(self._launcher.record(), f"{self.device}, from which values are read")
            return self.xp.asnumpy(array)  # type: ignore[no-any-return]

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
        updated: Sequence[Updated] = (),
        borrowed: Sequence[int] = (),
    ) -> DensePlan:
        targets = list(targets)
        for position in borrowed:
            var, slots = targets[position]
            targets[position] = Target(self.unowned(var), slots)
        with self.enter():
            return DensePlan(self._launcher, targets, updated)

    def overlapping(self, plans: Sequence[DensePlan], arrays: Sequence[Any]) -> list[int]:
        return overlapping(self._launcher, plans, arrays)

    def apply_dense(
        self,
        rule: UpdateRule,
        plan: DensePlan,
        gradients: Sequence[Any],
        scalars: Scalars,
        *,
        version: int | None = None,
        refused: Any = None,
        kept: Sequence[Any] = (),
    ) -> None:
        if plan.num_variables == 0:
            return
        flags = () if refused is None else (refused,)
        with self._lock, self._launcher.device():
            last = plan.last_update = self._order.begin(plan.updated, plan.last_update)
            used: Sequence[Any] = ()
            try:
                if flags:
                    self._order.follow(flags)
                on_device = self._scalars_on_device(rule, plan.dtype, scalars)
                table, chunks, used = plan.begin(gradients, version)
                self._launcher.launch(
                    kernels.dense_update(rule, name_of(plan.dtype)),
                    num_blocks(plan.num_chunks, 1, self._launcher.num_multiprocessors),
                    DENSE_THREADS,
                    table=table,
                    num_variables=plan.num_variables,
                    chunks=chunks,
                    num_chunks=plan.num_chunks,
                    chunk_size=DENSE_CHUNK,
                    scalars=on_device,
                    refused=self._flag_array(refused),
                )
                plan.end()
            finally:
                self._order.end(last, (plan.memory, gradients, used, kept, flags), flags)

    def apply_sparse(
        self,
        rule: UpdateRule,
        plan: DensePlan,
        values: Any,
        rows: Any,
        scalars: Scalars,
        *,
        touches_all_rows: bool,
        refused: Any = None,
        kept: Sequence[Any] = (),
    ) -> None:
        [(var, slots)] = plan.targets
        if not var.size:
            return
        contiguous = self.xp.ascontiguousarray
        arrays = [var, *slots]
        flags = () if refused is None else (refused,)
        used = [plan.memory, values, rows, kept, flags]
        with self._lock, self._launcher.device():
            last = plan.last_update = self._order.begin(plan.updated, plan.last_update)
            try:
                if flags:
                    self._order.follow(flags)
                flat = [contiguous(array) for array in arrays]
                values, rows = contiguous(values), contiguous(rows)
                if any(self.xp.may_share_memory(values, array) for array in flat):
                    values = values.copy()
                used += [values, rows]
                self._apply_sparse(
                    rule, flat, values, rows, scalars, touches_all_rows, self._flag_array(refused)
                )
                for array, worked_on in zip(arrays, flat, strict=True):
                    if self._launcher.address(array) != self._launcher.address(worked_on):
                        array[...] = worked_on
            except BaseException:
                # Bits of touched rows may be set that no kernel will clear.
                self._workspaces.pop(self._launcher.stream(), None)
                raise
            finally:
                self._order.end(last, used, flags)

    def sum_duplicate_rows(self, values: Any, indices: Any) -> tuple[Any, Any]:
        real = np.dtype(compute_type(values.dtype))
        if not indices.size or not values.size:
            return values.astype(real), indices
        with self._lock, self._launcher.device():
            given = values, indices
            values = self.xp.ascontiguousarray(values)
            width = math.prod(values.shape[1:])
            workspace = self._workspace()
            height = self._read_number(indices.max(keepdims=True)) + 1
            indices = self.xp.ascontiguousarray(indices)
            rows = sort_rows(self._launcher, workspace, indices, height, self._unset_flag.array)
            parts = self._sum_pieces(rows, values, width, workspace, self._unset_flag.array)
            num_sums = self._read_number(rows.num_runs)
            sums = self.xp.empty((num_sums, *values.shape[1:]), dtype=real)
            lanes = lanes_per_row(width, 1)
            self._launcher.launch(
                kernels.sum_runs(name_of(values.dtype), name_of(rows.keys.dtype)),
                self._row_blocks(sums.shape[0], lanes),
                ROW_THREADS,
                grad=values,
                rows=rows,
                parts=parts,
                row_width=width,
                sums=sums,
                lanes_per_row=lanes,
                refused=self._unset_flag.array,
            )
            first = rows.positions[rows.begins[: sums.shape[0]]]
            order = self.xp.argsort(first)
            self._order.hold(given)
            return sums[order], indices[first[order]]

    def _apply_sparse(
        self,
        rule: UpdateRule,
        arrays: Sequence[Any],
        grad: Any,
        indices: Any,
        scalars: Scalars,
        touches_all_rows: bool,
        refused: Any,
    ) -> None:
        var = arrays[0]
        name = name_of(var.dtype)
        height, width = var.shape[0], math.prod(var.shape[1:])
        workspace = self._workspace()
        on_device = self._scalars_on_device(rule, var.dtype, scalars)
        table = workspace.constants("table", self._launcher.addresses(arrays))
        touched = None
        if touches_all_rows:
            touched = workspace.zeros("touched", -(-height // ROWS_PER_WORD), "uint32")
        rows = None
        if indices.size:
            rows = sort_rows(self._launcher, workspace, indices, height, refused, touched=touched)
        if touches_all_rows:
            elements = var.size // self._pack_size(var.dtype)
            self._launcher.launch(
                kernels.update_other_rows(rule, name),
                num_blocks(elements, ROW_THREADS, self._launcher.num_multiprocessors),
                ROW_THREADS,
                table=table,
                size=var.size,
                row_width=width,
                scalars=on_device,
                touched=touched,
                refused=refused,
            )
        if rows is None:
            return
        lanes = lanes_per_row(width, self._pack_size(var.dtype))
        parts = self._sum_pieces(rows, grad, width, workspace, refused)
        self._launcher.launch(
            kernels.sparse_update(rule, name, name_of(rows.keys.dtype)),
            self._row_blocks(min(rows.num_rows, height), lanes),
            ROW_THREADS,
            table=table,
            grad=grad,
            rows=rows,
            parts=parts,
            row_width=width,
            scalars=on_device,
            touched=touched,
            lanes_per_row=lanes,
            refused=refused,
        )

    def _sum_pieces(
        self, rows: SortedRows, grad: Any, width: int, workspace: Workspace, refused: Any
    ) -> Any:
        """Enqueues the sums of long runs' parts; returns the array that they are written to."""
        num_pieces = -(-rows.num_rows // PIECE)
        real = name_of(np.dtype(compute_type(grad.dtype)))
        parts = workspace.take("parts", 2 * num_pieces * width, real)
        if rows.num_rows > LONG_RUN:  # shorter runs have no parts
            lanes = lanes_per_row(width, self._pack_size(grad.dtype))
            self._launcher.launch(
                kernels.sum_pieces(name_of(grad.dtype), name_of(rows.keys.dtype)),
                self._row_blocks(num_pieces, lanes),
                ROW_THREADS,
                grad=grad,
                rows=rows,
                row_width=width,
                parts=parts,
                lanes_per_row=lanes,
                refused=refused,
            )
        return parts

    def _read_number(self, array: Any) -> int:
        """Returns an array's one number; the host waits for it."""
        found = self._launcher.download(array)
        found.wait(f"{self.device}, from which a number is read")
        return int(found.values.item())

    def _workspace(self) -> Workspace:
        stream = self._launcher.stream()
        found = self._workspaces.get(stream)
        if found is None:
            if len(self._workspaces) == MOST_STREAMS:
                # Of the first stream, which may have ended. Its memory goes back to that stream,
                # behind the work that uses it.
                del self._workspaces[next(iter(self._workspaces))]
            found = self._workspaces[stream] = Workspace(self._launcher)
        return found

    def _scalars_on_device(self, rule: UpdateRule, dtype: np.dtype[Any], scalars: Scalars) -> Any:
        real = np.dtype(compute_type(dtype))
        host = np.array([scalars[name] for name in rule.scalars], real)
        return self._workspace().constants(f"scalars of {rule.name}", host)

    def _flag_array(self, refused: Any) -> Any:
        return (self._unset_flag if refused is None else refused).array

    def _row_blocks(self, num_rows: int, lanes: int) -> int:
        return num_blocks(num_rows * lanes, ROW_THREADS, self._launcher.num_multiprocessors)

    def _pack_size(self, dtype: np.dtype[Any]) -> int:
        return PACK_BYTES // dtype.itemsize
