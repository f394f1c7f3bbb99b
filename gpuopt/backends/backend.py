"""The protocol of a backend: the operations on one device that optimizers need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.clips import Clips
from gpuopt.backends.loss_scaling import LossScalings
from gpuopt.backends.memory_owner import Owner
from gpuopt.backends.norms import Norms
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.codecs import Codecs, codec_of
from gpuopt.device import Device
from gpuopt.locks import Lock
from gpuopt.rules.update_rule import UpdateRule

Array = Any
Scalars = Mapping[str, "np.floating[Any]"]

# Of the rows of a sparse gradient.
INDEX_DTYPES = frozenset(map(np.dtype, (np.int32, np.int64)))


class Updated(Protocol):
    """Something whose updates are put in order: a variable's or slot's identity.

    Attributes:
        last_update: The backend's record of the last update, or None.
    """

    last_update: Any


class Target(NamedTuple):
    """One variable's arrays that a rule updates in place.

    Attributes:
        var: Of any strides.
        slots: In the rule's order; each of var's shape, or of `row_shape` if it is one of the
            rule's row slots. Where they are in 8 bits, the codes of each, and then the scales of
            each: see `CodedValues`.
        companion: The second array that stores the variable, if its codec has two.
        first_number: The number of the variable's first element, for stages of the gradient: so
            the elements of two variables can have different numbers.
    """

    var: Array
    slots: Sequence[Array]
    companion: Array | None = None
    first_number: int = 0

    @property
    def arrays(self) -> list[Array]:
        """All arrays, in this order."""
        return [self.var, *self.slots, *([] if self.companion is None else [self.companion])]


class SparseUpdate(NamedTuple):
    """The update of one variable's rows.

    Attributes:
        plan: From `plan_dense`, of this variable alone.
        values: [num_rows, ...], the gradient's rows. Only read.
        rows: [num_rows], int32 or int64 within range: which row each belongs to.
        group: The position of the variable's scalars among those that `apply_sparse` is given.
        catch_up: Of a table whose rows may be behind: those that are named are brought up to date
            first, and the step is counted. It has room for a step.
    """

    plan: Any
    values: Array
    rows: Array
    group: int = 0
    catch_up: CatchUp | None = None


class RowCopy(NamedTuple):
    """Rows that are written to an array, from one of the same dtype and width, or as a number.

    Attributes:
        target: [height, ...], contiguous; shares no memory with `source`.
        source: [num_rows, ...], or a number of the target's dtype.
        from_rows: int64 [num_rows], on the device: which rows of `source` are copied; None for all
            of them, in order.
        to_rows: int64 [num_rows], on the device, without repeats: which rows of `target` they
            become; None for all of them, in order.
    """

    target: Array
    source: Any
    from_rows: Array | None = None
    to_rows: Array | None = None


class DensePlan(Protocol):
    """What a backend prepares for updates of some variables of one dtype."""

    def accept(
        self, gradients: Sequence[Any], others: Collection[np.dtype[Any]] = ()
    ) -> int | None:
        """Returns the gradients' version, or None if one does not fit its variable.

        A gradient fits if it is a plain array on this device, of its variable's shape and dtype.

        Args:
            gradients: One for each variable.
            others: Other dtypes that all of them may have, if loops convert from it.

        Returns:
            The version: it is the same number only as long as the gradients are the same arrays.
        """

    def accept_rows(self, values: Any, indices: Any) -> tuple[int, ...] | None:
        """Returns the shape of the only variable if arrays are a sparse gradient for it, else None.

        They are plain arrays on this device, of `INDEX_DTYPES` and the variable's dtype. Rows are
        within range, unless the device checks them later.
        """


class FlagRead(Protocol):
    """A flag's value on its way to the host.

    Attributes:
        values: {0, 0}, or {1 + a variable's number, a row that it lacks}; to be read when done.
        is_done: Whether it has arrived.
    """

    @property
    def values(self) -> np.ndarray[Any, Any]: ...

    @property
    def is_done(self) -> bool: ...

    def wait(self, what: str) -> None:
        """Makes the host wait for it.

        Args:
            what: A description of the awaited work, for the error.

        Raises:
            DeadlineExceededError: it does not arrive.
        """


class RowCheck(NamedTuple):
    """The rows of one sparse gradient.

    Attributes:
        number: Identifies the variable to the reader of the flag.
        rows: [num_rows], int32 or int64.
        height: The variable's number of rows, which the rows must be below.
    """

    number: int
    rows: Array
    height: int


class RowFlags(Protocol):
    """Checks rows of sparse gradients on the device, while the host goes on.

    A flag is in device memory, and kernels read it before they write anything. All but `new` and
    `unless_set` are updates of the flag, in order across streams like those of a variable. The
    first `check` is called on the stream of `new`.
    """

    def new(self) -> Updated:
        """Returns a flag that is not set."""

    def check(self, flag: Any, checks: Sequence[RowCheck]) -> None:
        """Sets a flag that is not set yet if a row is not in its variable.

        This is done before the next update that gets the flag writes anything, or the next `read`.
        """

    def read(self, flag: Any) -> FlagRead:
        """Begins to copy a flag to the host."""

    def clear(self, flag: Any) -> None:
        """Unsets a flag."""

    def memory(self, flag: Any) -> Array:
        """Returns a flag's array, to be copied to another device; called as `unless_set` is."""

    def join(self, flag: Any, other: Array) -> None:
        """Sets a flag that is not set as another one is, whose `memory` was brought here."""

    def unless_set(self, flag: Any, new: Array, old: Array) -> Array:
        """Returns `new`, or `old` if the flag is set; called inside `enter_reading(flag)`."""


class Backend(Protocol):
    """Arrays and updates on one device. Methods may be called whichever device is current.

    Attributes:
        xp: The device's array module: numpy, or one with numpy's names. Its functions are called
            inside `enter()`.
        device: Where its arrays live.
        row_flags: None if the host can check rows itself.
        loss_scalings: None if the host decides about steps itself.
        most_rows: How many rows a sparse gradient may have; None if only memory limits them.
        locks: Those that one thread at a time holds while it gives the device work.
    """

    xp: Any
    device: Device
    most_rows: int | None
    locks: Sequence[Lock]

    @property
    def row_flags(self) -> RowFlags | None: ...

    @property
    def loss_scalings(self) -> LossScalings | None: ...

    @property
    def norms(self) -> Norms: ...

    @property
    def clips(self) -> Clips: ...

    def enter(self, *read: Updated) -> AbstractContextManager[Any]:
        """Makes this the current device; work inside waits for the last updates of `read`."""

    def enter_reading(
        self, *read: Updated, kept: Sequence[Any] = ()
    ) -> AbstractContextManager[Any]:
        """Does what `enter` does; the next updates of `read` wait for the work inside.

        Args:
            read: The identities that are read.
            kept: See `enter_update`.
        """

    def enter_update(
        self, *updated: Updated, kept: Sequence[Any] = ()
    ) -> AbstractContextManager[Any]:
        """Makes this the current device; work inside follows earlier work on `updated`.

        Later work on `updated` waits for the work inside.

        Args:
            updated: The identities that are written.
            kept: Arrays that the work reads or writes: their memory is not given to another stream
                before it is done.
        """

    def note_reading(self, *read: Updated, kept: Sequence[Any] = ()) -> None:
        """Makes the next updates of `read` wait for the current stream's work so far.

        Nothing is done as long as all calls have come on one stream.

        Args:
            read: The identities that were read.
            kept: See `enter_update`.
        """

    def hold(self, *arrays: Any) -> None:
        """Keeps arrays alive until the current stream's work so far is done, if need be."""

    def refuse_capture(self, call: str = "apply_gradients") -> None:
        """Raises RuntimeError if the current stream is being captured into a CUDA graph.

        `enter_reading`, `enter_update` and `full` do so, too.

        Args:
            call: The call that belongs outside of the capture, for the error.
        """

    def refuse_reads(self, why: str | None) -> None:
        """Makes `to_host` and `stage` raise DeadlineExceededError, or allows them again.

        For work that was given up before it was done: later work has computed wrong values.

        Args:
            why: The work that was not done; None if values may be read.
        """

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        """Names the work inside for the device's profilers."""

    def record_creation(self, new: Updated) -> None:
        """Records the first write of `new` on the current stream: updates on others wait for it."""

    def as_array(self, value: Any) -> Array:
        """Returns an array of `xp` on the memory of `value`, which is on this device already."""

    def plain_array(self, value: Any) -> Array | None:
        """Returns an array on the same memory that can be updated; None if `value` has none."""

    def layout(self, array: Array) -> np.ndarray[Any, Any]:
        """Returns numpy's array of the same address, shape and strides; it must not be read."""

    def unowned(self, array: Array) -> Array:
        """Returns an array on the same memory, of its shape, strides and dtype, that owns nothing.

        It must not be used once the memory is gone; `Identity.holder` returns the object to watch.
        """

    def memory_owner(self, array: Array, address: int) -> Owner:
        """Finds who owns an array's memory; see `Owner`.

        Args:
            array: Of this device.
            address: Of its first element.
        """

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns new aligned storage; see `full`."""

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
        """Returns new aligned storage with `value` written to it.

        Small arrays made one after the other may lie side by side, for faster updates.

        Args:
            shape: The storage's.
            dtype: The storage's.
            value: A number, or an array of `shape`, on this device or in host memory.
        """

    def to_host(self, array: Array, *, even_if_refused: bool = False) -> np.ndarray[Any, Any]:
        """Waits for the current stream's work, and returns a copy in host memory.

        Args:
            array: Of this device.
            even_if_refused: Whether to return values after `refuse_reads`, too.
        """

    def overwrite(self, array: Array, values: np.ndarray[Any, Any]) -> None:
        """Writes values in host memory to an array; if it is contiguous, without other memory.

        Args:
            array: Of this device.
            values: Of its shape and dtype. They may be overwritten as soon as this returns.
        """

    def stage(self, array: Array) -> np.ndarray[Any, Any]:
        """Waits for the current stream's work, and returns an array's values for a message.

        Returns:
            A C-contiguous array. On the CPU it may be the given one, and must not be written; of a
            GPU it is a copy in page-locked memory, to be let go soon.
        """

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        """Returns a copy, on this device, of an array in host memory."""

    def from_peer(self, array: Array, peer: Any) -> Array:
        """Returns a copy, on this device, of an array on another GPU, whose backend is `peer`."""

    def plan_dense(
        self,
        targets: Sequence[Target],
        codecs: Codecs | None = None,
        updated: Sequence[Updated] = (),
        borrowed: Sequence[int] = (),
        groups: Sequence[int] | None = None,
    ) -> DensePlan:
        """Prepares updates of variables of one dtype that share no memory.

        Args:
            targets: The variables to update, with their slots.
            codecs: How each of them is stored; by default by the types of the first one: see
                `codecs_of`. With master copies and copies, the plan accepts gradients of the
                copies' dtype.
            updated: The identities of these variables and slots.
            borrowed: The positions of variables in memory of the caller's. The plan does not keep
                this memory alive, and must not be used once it is gone.
            groups: For each variable, the position of its scalars among those that `apply_dense` is
                given; by default there is one group.

        Returns:
            The plan for `apply_dense` and, if there is a single variable, for `apply_sparse`. It is
            valid as long as the arrays exist.
        """

    def overlapping(self, plans: Sequence[Any], arrays: Sequence[Array]) -> Sequence[int]:
        """Returns the positions of arrays that share memory with what any of the plans writes."""

    def apply_dense(
        self,
        rule: UpdateRule,
        plan: Any,
        gradients: Sequence[Array],
        scalars: Sequence[Scalars],
        *,
        record: StepRecord = NOTHING_KNOWN,
        version: int | None = None,
        read: Sequence[Updated] = (),
        kept: Sequence[Any] = (),
    ) -> None:
        """Applies `rule` to every element of every variable of a plan.

        On the CPU, numpy may warn of NaN and infinity, unless called by `ignore_fp_warnings`.

        Args:
            rule: The rule. If it has sums, they are summed first, over each variable in one
                order, and the host does not wait for them. If it is row-wise, each entry along a
                variable's first axis is a row, and a scalar is one row.
            plan: From `plan_dense`.
            gradients: One for each variable, of its shape, all of one dtype: the variables', or
                where both have at most 32 bits, another. Only read; may be broadcast views, and
                share memory with each other and with what is written.
            scalars: The rule's scalars in the compute type of the variables' dtype: those of each
                group of the plan.
            record: See `StepRecord`.
            version: Of the gradients, from the plan's `accept`; None if unknown.
            read: The identities of variables whose memory gradients are: see `enter_reading`.
            kept: The owners of memory that the plan borrows: see `enter_update`.
        """

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
        """Applies `rule` to the rows of sparse gradients, with repeated rows summed first.

        Args:
            rule: The rule. If it has sums, they are taken from `scalars`.
            updates: Of variables of one dtype, by gradients of one dtype: see `apply_dense`. A
                gradient may share memory with its own variable and slots, but with none of another
                update.
            scalars: The scalars of both rules in the compute type of the variables' dtype: those of
                each group of the updates.
            other_rows: A rule with the same slots that updates rows without a gradient, by a
                gradient of 0; None if they stay, or catch up later.
            record: See `StepRecord`.
            kept: The owners of memory that the plan borrows: see `enter_update`.
        """

    def bring_up_rows(self, plan: Any, catch_up: CatchUp, rows: Array | None = None) -> None:
        """Brings rows of a table up to date that missed steps.

        Args:
            plan: From `plan_dense`, of this variable alone.
            catch_up: The table's.
            rows: Integers on the device, within range, of any shape; they may repeat. None for all
                rows. A GPU leaves out those that are not within range.
        """

    def measure_copy(self) -> float:
        """Returns how many bytes a second a copy of a large array reads and writes.

        It is the best of a few; the host waits for it.
        """

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Copies rows within this device: on a GPU in one launch, and without a check of the rows.

        Ctrl-C comes before the first of the copies, or after the last.

        Args:
            copies: Of any dtypes and shapes. What one writes, no other one reads or writes. To be
                called inside `enter_update` of all targets and sources.
        """

    def true_positions(self, mask: Array) -> Array:
        """Returns where a vector of bool is true, int64; the host waits for their number."""

    def sum_duplicate_rows(self, values: Array, indices: Array) -> tuple[Array, Array]:
        """Adds up rows of `values` that share an index, in the order of `backends/row_order.py`.

        Returns:
            (sums, rows): float16 and bfloat16 are summed, and returned, in float32; `rows` are
            unique, in order of first appearance as TensorFlow gives them.
        """


def codecs_of(target: Target) -> Codecs:
    """Returns the codecs of a variable and slots that are one array of numbers each."""
    real = np.dtype(compute_type(target.var.dtype))
    return Codecs(
        codec_of(target.var.dtype, real), tuple(codec_of(each.dtype, real) for each in target.slots)
    )


def are_converted(dtypes: Iterable[np.dtype[Any]]) -> bool:
    """Whether loops convert between types: if they have at most 32 bits."""
    return max(dtype.itemsize for dtype in dtypes) <= 4


def accepted_dtype(
    given: np.dtype[Any], own: np.dtype[Any], others: Collection[np.dtype[Any]]
) -> np.dtype[Any]:
    """Returns the dtype that all gradients must have, by that of the first; see `DensePlan`."""
    return given if given in others and are_converted((given, own)) else own


def compute_type(dtype: np.dtype[Any]) -> type[np.float32] | type[np.float64]:
    """Returns the type a rule computes in: 16-bit storage is too coarse to compute in."""
    return np.float64 if dtype == np.float64 else np.float32
