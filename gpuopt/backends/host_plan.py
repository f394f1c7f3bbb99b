"""How variables in host memory are cut into tasks: large ones in chunks, small ones together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends.backend import Target, compute_type
from gpuopt.backends.host_memory import Array, owner, runs, scratch

# Below this, a call costs more than what it computes.
_SMALL_ELEMENTS = 8 * 1024
_PACK_BYTES = 128 * 1024
# Of small gradients: up to here, all are copied before the first of them is used.
_COPIED_BYTES = 1024 * 1024
# What the scratch arrays of all threads may take together.
_SCRATCH_BYTES = 6 * 1024 * 1024


class Kernel(Protocol):
    """A rule with one step's scalars, as something that updates flat chunks in any thread.

    Attributes:
        scratch_dtypes: Of the scratch arrays that `apply` wants.
        most_elements: How long a chunk should be at most.
        update_pieces: Updates chunks by their addresses, all that there are, in one call from each
            thread; None if it cannot. See `CompiledRule`.
    """

    @property
    def scratch_dtypes(self) -> Sequence[np.dtype[Any]]: ...

    @property
    def most_elements(self) -> int: ...

    @property
    def update_pieces(self) -> Callable[[Array, Array], None] | None: ...

    def apply(self, written: Sequence[Array], grad: Array | None, scratch: Sequence[Array]) -> None:
        """Updates chunks of one length.

        Args:
            written: Of the variable and its slots.
            grad: Of the gradient; None if the kernel was made for one that is zero everywhere.
            scratch: As long as the chunks, of `scratch_dtypes`.
        """


def chunk_length(kernel: Kernel, size: int, threads: int, converted_bytes: int = 0) -> int:
    """Returns how long chunks should be.

    Args:
        kernel: What updates them.
        size: Elements of all that is updated.
        threads: How many share it.
        converted_bytes: What a thread needs for each element to convert between types.
    """
    scratch_bytes = converted_bytes + sum(dtype.itemsize for dtype in kernel.scratch_dtypes)
    longest = min(kernel.most_elements, -(-size // threads))
    if scratch_bytes:
        longest = min(longest, _SCRATCH_BYTES // (threads * scratch_bytes))
    return max(longest, 1)


def _update_chunk(
    kernel: Kernel, real: np.dtype[Any], written: Sequence[Array], grad: Array | None
) -> None:
    """Updates chunks of any type that converts to `real`, and back."""
    size = len(written[0])
    if written[0].dtype == real:
        kernel.apply(written, grad, scratch(kernel.scratch_dtypes, size))
        return
    given = [*written, *([] if grad is None else [grad])]
    arrays = scratch([*[real] * len(given), *kernel.scratch_dtypes], size)
    converted = arrays[: len(given)]
    for array, chunk in zip(converted, given, strict=True):
        np.copyto(array, chunk)
    kernel.apply(
        converted[: len(written)],
        None if grad is None else converted[-1],
        arrays[len(given) :],
    )
    for array, chunk in zip(converted, written, strict=False):
        np.copyto(chunk, array, casting="unsafe")


Task = Callable[[], None]


class _Chunks:
    """Large variables and their slots, cut into chunks.

    Attributes:
        longest: How long a chunk should be at most.
    """

    def __init__(self, targets: Sequence[Target], longest: int) -> None:
        self.longest = longest
        self._written = [[array.reshape(-1) for array in (var, *slots)] for var, slots in targets]
        sizes = np.array([var.size for var, _ in targets], np.intp)
        counts = -(-sizes // longest)
        lengths = -(-sizes // counts)
        # Of each chunk: which variable's it is, and which of its elements. A billion elements are
        # thousands of chunks, so nothing else is kept of them.
        self._owners = np.repeat(np.arange(len(targets)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = (np.arange(len(before)) - before) * lengths[self._owners]
        self._ends = np.minimum(self._starts + lengths[self._owners], sizes[self._owners])

    def __len__(self) -> int:
        return len(self._owners)

    def update(
        self,
        kernel: Kernel,
        real: np.dtype[Any],
        gradients: Sequence[Array | None] | None,
        left: deque[int],
    ) -> None:
        """Updates chunks until none is left; threads that call it at once share them.

        Args:
            kernel: What updates them.
            real: The type that it computes in.
            gradients: Of the targets, flat; None leaves its target out. Without any, they are zero
                everywhere.
            left: The numbers of the chunks still to be updated, by all callers.
        """
        while left:
            try:
                number = left.popleft()
            except IndexError:  # another thread took the last one
                return
            owner, part = self._owners[number], slice(self._starts[number], self._ends[number])
            gradient = None if gradients is None else gradients[owner]
            if gradients is None or gradient is not None:
                written = [array[part] for array in self._written[owner]]
                _update_chunk(kernel, real, written, None if gradient is None else gradient[part])

    def pieces(self, gradients: Sequence[Array | None] | None) -> Array:
        """Returns them by their addresses, for `CompiledRule.update_pieces`; see `update`."""
        pieces = self._pieces
        if gradients is not None:
            starts = [0 if gradient is None else gradient.ctypes.data for gradient in gradients]
            grads = np.array(starts, np.intp)[self._owners]
            present = grads != 0
            pieces = pieces[present]
            pieces[:, -2] = (grads + self._offsets)[present]
        return pieces

    @cached_property
    def _offsets(self) -> Array:
        """Of each chunk: how many bytes of each of its arrays lie before it."""
        offsets: Array = self._starts * self._written[0][0].itemsize
        return offsets

    @cached_property
    def _pieces(self) -> Array:
        """Pieces without gradients."""
        addresses = [[array.ctypes.data for array in arrays] for arrays in self._written]
        written = np.array(addresses, np.intp)[self._owners] + self._offsets[:, np.newaxis]
        return np.column_stack([written, np.zeros_like(self._starts), self._ends - self._starts])


class DensePlan:
    """Variables of one dtype and their slots, sorted by how they are best updated.

    Slots may be of another dtype, as a subclass may have made them.

    It holds as long as the arrays do: updates write into them and never replace them.

    Attributes:
        real: The type that rules compute in.
        size: How many elements there are.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        stored = targets[0].var.dtype
        self.real = np.dtype(compute_type(stored))
        self.size = sum(var.size for var, _ in targets)
        self._targets = targets
        self._memory = _Memory([array for var, slots in targets for array in (var, *slots)])
        converted = 0 if stored == self.real else 2 + len(targets[0].slots)
        self._converted_bytes = converted * self.real.itemsize
        self._strided: list[int] = []
        self._large: list[int] = []
        small: list[int] = []
        for position, (var, slots) in enumerate(targets):
            if not all(array.flags.carray and array.dtype == stored for array in (var, *slots)):
                self._strided.append(position)
            elif var.size:
                (small if var.size < _SMALL_ELEMENTS else self._large).append(position)
        self._chunks = _Chunks([], 0)
        self._packs = _packs(targets, small, _PACK_BYTES // self.real.itemsize)
        small_bytes = stored.itemsize * sum(targets[position].var.size for position in small)
        self._copies_small = small_bytes <= _COPIED_BYTES
        # Gradients that are still read when something is written.
        self._read_late = [*self._large, *self._strided, *([] if self._copies_small else small)]

    def without_overlap(self, gradients: Sequence[Array]) -> list[Array]:
        """Returns the gradients, those copied that share memory with what is written before."""
        apart = list(gradients)
        for position in self._read_late:
            gradient = apart[position]
            if gradient.base is not None or id(gradient) in self._memory.owners:
                apart[position] = self._memory.copied_if_inside(gradient)
        return apart

    def tasks(
        self, kernel: Kernel, gradients: Sequence[Array], threads: int
    ) -> tuple[list[Task], list[tuple[Target, Array]]]:
        """Cuts a step into tasks that write to different memory.

        The caller keeps the gradients until the tasks are done.

        Returns:
            (tasks, strided): the targets and gradients of `strided` are not flat in memory.
        """
        strided = list(self._strided)
        flat: list[Array | None] = []
        for position in self._large:
            gradient = gradients[position]
            if gradient.flags.c_contiguous and gradient.flags.aligned:
                flat.append(gradient.reshape(-1))
            else:
                flat.append(None)
                strided.append(position)
        small: list[Task] = []
        for pack in self._packs:
            join = partial(pack.join, gradients, self.real)
            grad = join() if self._copies_small else join
            small.append(partial(pack.update, kernel, self.real, grad))
        # While one thread is in the interpreter with the small ones, others need not wait for it.
        large = self._large_tasks(kernel, flat, threads)
        tasks = [*large[:1], *small, *large[1:]]
        return tasks, [(self._targets[position], gradients[position]) for position in strided]

    def tasks_without_gradients(self, kernel: Kernel, threads: int) -> list[Task]:
        """Cuts a step of large variables by a kernel for gradients that are zero everywhere."""
        return self._large_tasks(kernel, None, threads)

    def _large_tasks(
        self, kernel: Kernel, gradients: Sequence[Array | None] | None, threads: int
    ) -> list[Task]:
        if not self._large:
            return []
        longest = chunk_length(kernel, self.size, threads, self._converted_bytes)
        chunks = self._chunks
        if chunks.longest != longest:
            targets = [self._targets[position] for position in self._large]
            chunks = self._chunks = _Chunks(targets, longest)
        share: Task
        if kernel.update_pieces is not None and not self._converted_bytes:
            share = partial(kernel.update_pieces, chunks.pieces(gradients), np.zeros(1, np.int64))
        else:
            share = partial(chunks.update, kernel, self.real, gradients, deque(range(len(chunks))))
        return [share] * min(threads, len(chunks))


class _Pack:
    """Small variables that are updated together, as if they were one."""

    def __init__(self, targets: Sequence[Target], positions: Sequence[int]) -> None:
        self._positions = positions
        self._size = sum(var.size for var, _ in targets)
        var_and_slots = zip(*[(var, *slots) for var, slots in targets], strict=True)
        self._runs = [runs([array.reshape(-1) for array in arrays]) for arrays in var_and_slots]

    def join(self, gradients: Sequence[Array], real: np.dtype[Any]) -> Array:
        """Copies the gradients into one flat array of the compute type."""
        members: list[Any] = [gradients[position] for position in self._positions]
        try:
            # Much quicker than np.concatenate, which has no need of C order.
            flat = np.frombuffer(b"".join(members), members[0].dtype)
        except TypeError:  # not in C order
            flat = np.concatenate(members, axis=None)
        return flat.astype(real, copy=False)

    def update(
        self, kernel: Kernel, real: np.dtype[Any], grad: Array | Callable[[], Array]
    ) -> None:
        grad = grad() if callable(grad) else grad
        gathered = [len(joined) > 1 or joined[0].dtype != real for joined in self._runs]
        buffers = scratch([*[real] * sum(gathered), *kernel.scratch_dtypes], self._size)
        written = [
            np.concatenate(joined, out=buffers.pop(0)) if is_gathered else joined[0]
            for joined, is_gathered in zip(self._runs, gathered, strict=True)
        ]
        kernel.apply(written, grad, buffers)
        for joined, chunk, is_gathered in zip(self._runs, written, gathered, strict=True):
            if is_gathered:
                _spread(chunk, joined)


def _spread(values: Array, flats: Sequence[Array]) -> None:
    start = 0
    for flat in flats:
        flat[...] = values[start : start + flat.size]
        start += flat.size


def _packs(targets: Sequence[Target], positions: Sequence[int], most_elements: int) -> list[_Pack]:
    packs: list[_Pack] = []
    first = size = 0
    for last, position in enumerate(positions):
        size += targets[position].var.size
        following = positions[last + 1 : last + 2]
        if not following or size + targets[following[0]].var.size > most_elements:
            members = positions[first : last + 1]
            packs.append(_Pack([targets[member] for member in members], members))
            first, size = last + 1, 0
    return packs


class _Memory:
    """The memory that a plan's updates write to.

    Attributes:
        owners: Ids of the arrays that own it.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        # An array may own none of its memory: that is then known by its bounds alone.
        self.owners = {id(owner(array)) for array in arrays}
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(byte_bounds(array) for array in arrays if array.size):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def copied_if_inside(self, array: Array) -> Array:
        root = owner(array)
        apart = root.base is None and id(root) not in self.owners
        if apart or not array.size:
            return array
        start, end = byte_bounds(array)
        # Spans that end at or before the array's start, and those that start before its end.
        overlaps = bisect_right(self._ends, start) < bisect_left(self._starts, end)
        return array.copy() if overlaps else array
