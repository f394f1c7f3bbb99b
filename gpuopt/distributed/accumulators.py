"""Accumulators: gradients of one variable from several workers, until enough are there."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.backends.backend import compute_type
from gpuopt.device import Device
from gpuopt.distributed.reduction import add_up_rows
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, check_timeout
from gpuopt.errors import CancelledError, DeadlineExceededError
from gpuopt.locks import Condition, renew_after_fork
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading, storage_of
from gpuopt.variables.scalars import step_number

ReductionType = Literal["MEAN", "SUM"]
# None stands for any size.
PartialShape = Sequence[int | None]

_Accumulated = TypeVar("_Accumulated")
_logger = logging.getLogger("gpuopt")


class _Accumulator(Generic[_Accumulated]):
    """Counts gradients, drops late ones, and hands over what was accumulated, in turn."""

    def __init__(
        self,
        dtype: Any,
        shape: PartialShape | None = None,
        reduction_type: ReductionType = "MEAN",
        *,
        device: Device | str = "cpu",
        name: str = "conditional_accumulator",
    ) -> None:
        """Makes an empty accumulator at step 0.

        Args:
            dtype: The dtype of every gradient.
            shape: The shape of every gradient. None in place of a size, or of the shape, is decided
                by the first gradient after each take.
            reduction_type: What a take returns, "MEAN" or "SUM".
            device: Where gradients are accumulated.
            name: For messages.

        Raises:
            ValueError: `reduction_type` is neither.
        """
        if reduction_type not in ("MEAN", "SUM"):
            raise ValueError(f'reduction_type must be "MEAN" or "SUM", got {reduction_type!r}')
        self.dtype = np.dtype(dtype)
        self.name = name
        self.device = Device.parse(device)
        self._shape = None if shape is None else tuple(shape)
        self._is_mean = reduction_type == "MEAN"
        self._backend = backend_for(self.device)
        # The backend's record of the last update, by which streams wait for each other.
        self.last_update: Any = None
        self._compute = np.dtype(compute_type(self.dtype))
        self._changed = Condition(f'accumulator "{name}"')
        self._turns: deque[object] = deque()
        self._step = 0
        self._count = 0
        self._is_closed = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Nobody waits for a take any more."""
        self._changed.after_fork()
        self._turns.clear()

    def set_global_step(self, new_global_step: int) -> None:
        """Sets the step: gradients for earlier steps are late. Going back is legal, and logged.

        Raises:
            TypeError, ValueError: it is no whole number from 0.
        """
        step = step_number(new_global_step, "new_global_step")
        with self._changed:
            if step < self._step:
                _logger.warning('the step of "%s" goes back: %d to %d', self.name, self._step, step)
            self.drop_before(step)

    def num_accumulated(self) -> int:
        """Returns how many gradients have been accepted since the last take."""
        with self._changed:
            return self._count

    def take_grad(self, num_required: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> _Accumulated:
        """Waits for enough gradients and takes all that are there, as one; the step grows by 1.

        Takes are served in the order in which they were called.

        Args:
            num_required: How many gradients must have been accepted, at least 1.
            timeout_s: How long to wait, in seconds.

        Raises:
            ValueError: `num_required` is less than 1.
            DeadlineExceededError: the gradients did not come in time; nothing is taken.
            CancelledError: the accumulator was closed.
        """
        if num_required < 1:
            raise ValueError(f'"{self.name}": num_required must be at least 1, got {num_required}')
        check_timeout(timeout_s)
        with self._changed:
            self._refuse_if_closed()
            if self._turns or self._count < num_required:
                self._wait_for_turn(num_required, timeout_s)
            return self.take()

    def close(self) -> None:
        """Makes every take that waits, and every later call, raise CancelledError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # For a caller that lets one thread in at a time, and checks gradients beforehand.

    def accept(self, grad: Any, local_step: int) -> bool:
        """Adds a gradient; drops it and returns False if `local_step` is over."""
        if local_step < self._step:
            return False
        with self._backend.enter_update(self, kept=(grad,)):
            if self._count == 0:
                self._begin(grad)
            else:
                self._add(grad)
        self._count += 1
        return True

    def drop_before(self, step: int) -> None:
        """Makes gradients for steps before `step` late from now on; `step` may also go back."""
        self._step = step

    def has(self, num_required: int) -> bool:
        """Returns whether there are enough gradients for a take."""
        return self._count >= num_required

    def take(self) -> _Accumulated:
        """Returns the accumulated gradient; at least one must have been accepted."""
        with self._backend.enter_update(self):
            taken = self._reduce(self._count)
        self._count = 0
        self._step += 1
        return taken

    def _apply(self, grad: Any, local_step: int) -> bool:
        with self._changed:
            self._refuse_if_closed()
            accepted = self.accept(grad, local_step)
            if self._turns:
                self._changed.notify_all()
            return accepted

    def _wait_for_turn(self, num_required: int, timeout_s: float) -> None:
        turn = object()
        self._turns.append(turn)
        try:
            in_time = self._changed.wait_for(
                lambda: self._is_closed or (self._turns[0] is turn and self._count >= num_required),
                timeout_s,
            )
            self._refuse_if_closed()
            if not in_time:
                raise DeadlineExceededError(
                    f'"{self.name}": {self._count} of {num_required} gradients have come within '
                    f"{timeout_s:g} s"
                )
        finally:
            self._turns.remove(turn)
            self._changed.notify_all()

    def _refuse_if_closed(self) -> None:
        if self._changed.was_lost:
            raise CancelledError(
                f'another thread was adding to "{self.name}" when this process was forked: make a '
                "new accumulator"
            )
        if self._is_closed:
            raise CancelledError(f'"{self.name}" is closed')

    def _refuse_shape(self, shape: tuple[int, ...], expected: PartialShape) -> None:
        raise ValueError(
            f'gradient for "{self.name}" has shape {shape}; expected shape is {tuple(expected)}'
        )

    def _check_dtype(self, array: Any) -> Any:
        if array.dtype != self.dtype:
            raise TypeError(
                f'gradient for "{self.name}" has dtype {array.dtype}; the accumulator has dtype '
                f"{self.dtype}"
            )
        return array

    def _begin(self, grad: Any) -> None:
        raise NotImplementedError

    def _add(self, grad: Any) -> None:
        raise NotImplementedError

    def _reduce(self, count: int) -> _Accumulated:
        raise NotImplementedError


class ConditionalAccumulator(_Accumulator[Any]):
    """Adds up arrays from several workers; `take_grad` returns their mean or sum.

    TensorFlow's rules: a gradient whose `local_step` is below the accumulator's step is dropped; a
    take returns everything accepted since the last one, be it more than was required. 16-bit
    gradients are added up in float32 and rounded once.
    """

    _total: Any = None

    def apply_grad(self, grad: Any, local_step: int = 0) -> bool:
        """Adds a gradient, which is only read.

        Args:
            grad: An array of the accumulator's dtype and shape; nested lists of numbers; or a
                Variable.
            local_step: The step that the gradient was computed for.

        Returns:
            Whether it was accepted; False says that it came too late and was dropped.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape.
            CancelledError: the accumulator was closed.
        """
        with reading(grad):
            array = storage_of(grad)
            if not hasattr(array, "dtype"):
                array = np.asarray(array, self.dtype)
            array = to_device(self._check_dtype(array), self.device)
            expected = self._shape
            if expected is not None and not _fits(array.shape, expected):
                self._refuse_shape(array.shape, expected)
            return self._apply(array, local_step)

    def accept(self, grad: Any, local_step: int) -> bool:
        if self._count and grad.shape != self._total.shape and local_step >= self._step:
            self._refuse_shape(grad.shape, self._total.shape)
        return super().accept(grad, local_step)

    def _begin(self, grad: Any) -> None:
        if self._total is None or self._total.shape != grad.shape:
            self._total = self._backend.full(grad.shape, self._compute, grad)
        else:
            self._total[...] = grad

    def _add(self, grad: Any) -> None:
        self._backend.xp.add(self._total, grad, out=self._total)

    def _reduce(self, count: int) -> Any:
        if self._is_mean:
            mean = self._total / self._compute.type(count)
            return mean.astype(self.dtype, copy=False)
        total, self._total = self._total, None
        cast = total.astype(self.dtype, copy=False)
        self._backend.hold(total)
        return cast


class SparseConditionalAccumulator(_Accumulator[IndexedSlices]):
    """Adds up IndexedSlices from several workers; see `ConditionalAccumulator`.

    "MEAN" divides each row by the number of gradients that touch this row, not by the number of
    all: a row in one gradient of three comes back as it is. Repeated rows of one gradient are
    summed first and count once; TensorFlow keeps them apart, and merges only ascending rows.

    Each accepted gradient is copied, and the copy is kept until the take.
    """

    _parts: tuple[tuple[Any, Any], ...] = ()

    def apply_grad(self, grad: IndexedSlices, local_step: int = 0) -> bool:
        """Adds a gradient of some rows, which is only read.

        Args:
            grad: Rows of the accumulator's dtype, in any order; rows may repeat, or be none.
            local_step: The step that the gradient was computed for.

        Returns:
            Whether it was accepted; False says that it came too late and was dropped.

        Raises:
            TypeError: not IndexedSlices, or a wrong dtype.
            ValueError: a wrong shape.
            IndexError: a row is outside the accumulator's shape, or negative.
            CancelledError: the accumulator was closed.
        """
        if not isinstance(grad, IndexedSlices):
            raise TypeError(
                f'gradient for "{self.name}" must be IndexedSlices, got {type(grad).__name__}'
            )
        values = to_device(self._check_dtype(grad.values), self.device)
        indices = to_device(grad.indices, self.device)
        self._check_rows(values, indices, grad.dense_shape)
        # Outside the lock: workers do this at the same time.
        return self._apply(self.merge_rows(values, indices), local_step)

    # TensorFlow's names for gradients that are IndexedSlices.

    def apply_indexed_slices_grad(self, grad: IndexedSlices, local_step: int = 0) -> bool:
        """Does what `apply_grad` does."""
        return self.apply_grad(grad, local_step)

    def take_indexed_slices_grad(
        self, num_required: int, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> IndexedSlices:
        """Does what `take_grad` does."""
        return self.take_grad(num_required, timeout_s)

    def merge_rows(self, values: Any, indices: Any) -> tuple[Any, Any]:
        """Returns a gradient as `accept` takes it: a copy (values, indices) of unique rows."""
        with self._backend.enter():
            sums, rows = self._backend.sum_duplicate_rows(values, indices)
            if sums is values:
                sums = values.copy()
            return sums, rows.copy() if rows is indices else rows

    def accept(self, grad: Any, local_step: int) -> bool:
        row_shape = grad[0].shape[1:]
        if self._count and local_step >= self._step:
            expected = self._parts[0][0].shape[1:]
            if row_shape != expected:
                self._refuse_shape((-1, *row_shape), (None, *expected))
        return super().accept(grad, local_step)

    def _begin(self, grad: Any) -> None:
        self._parts = (grad,)

    def _add(self, grad: Any) -> None:
        self._parts += (grad,)

    def _reduce(self, count: int) -> IndexedSlices:
        values, rows = add_up_rows(self._backend.xp, self._parts, divide=self._is_mean)
        self._backend.hold(self._parts)
        self._parts = ()
        declared = self._shape
        dense_shape: Any = None
        if declared is not None and declared and declared[0] is not None:
            dense_shape = (declared[0], *values.shape[1:])
        return IndexedSlices(values.astype(self.dtype, copy=False), rows, dense_shape)

    def _check_rows(self, values: Any, indices: Any, dense_shape: tuple[int, ...] | None) -> None:
        expected = self._shape
        if expected is None:
            height = None if dense_shape is None else dense_shape[0]
        else:
            height = expected[0] if expected else 0
            if not _fits(values.shape[1:], expected[1:]):
                self._refuse_shape(values.shape, (None, *expected[1:]))
            if dense_shape is not None and not _fits(dense_shape, expected):
                self._refuse_shape(dense_shape, expected)
        with self._backend.enter():
            outside = indices < 0
            if height is not None:
                outside |= indices >= height
            if outside.any():
                offset = int(outside.argmax())
                raise IndexError(
                    f'gradient for "{self.name}": indices[{offset}] = {indices[offset]} is not in '
                    f"[0, {'any height' if height is None else height})"
                )


def _fits(shape: Sequence[int], expected: PartialShape) -> bool:
    return len(shape) == len(expected) and all(
        size == wanted or wanted is None for size, wanted in zip(shape, expected, strict=True)
    )
