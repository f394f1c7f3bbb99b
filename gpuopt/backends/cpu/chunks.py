"""Large variables, cut into chunks that threads share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.memory import Array
from gpuopt.computed_once import computed_once

# Columns of a table of chunks: see `Update::Chunk` in kernels/cpu/update.hpp.
_GRADIENT, _FIRST = -6, -3
# The most memory that the scratch arrays of all threads may take together.
_SCRATCH_BYTES = 6 * 1024 * 1024


def chunk_length(form: RuleForm, size: int, threads: int, converted_bytes: int = 0) -> int:
    """Returns how long chunks should be, for `size` elements that threads share.

    To convert between types, a thread needs `converted_bytes` for each element.
    """
    scratch_bytes = converted_bytes + sum(dtype.itemsize for dtype in form.scratch_dtypes)
    longest = min(form.most_elements, -(-size // threads))
    if scratch_bytes:
        longest = min(longest, _SCRATCH_BYTES // (threads * scratch_bytes))
    return max(longest, 1)


def row_width(arrays: Sequence[Array], *, per_block: int) -> int:
    """Returns the unit that a variable is cut in, in elements.

    A row, if the last array has one number for each row, or if blocks of codes end at rows; else a
    block of codes, or one element.

    Args:
        arrays: Those of the variable, which is not empty, and of its slots.
        per_block: How many codes share a number of the last array, their scale; 0 if it has none.
    """
    var, last = arrays[0], arrays[-1]
    if not per_block:
        return var.size // last.size
    return per_block if last.ndim == 1 else var.size // len(last)


class Chunks:
    """Large variables and their slots, cut into chunks of whole rows; see `row_width`.

    Attributes:
        longest: As it was given.
    """

    def __init__(
        self,
        variables: Sequence[Sequence[Array]],
        groups: Sequence[int],
        longest: int,
        first_numbers: Sequence[int] = (),
        *,
        per_block: int = 0,
    ) -> None:
        """Cuts variables.

        Args:
            variables: The arrays of each, contiguous and not empty.
            groups: The number of each one's group.
            longest: How many elements a chunk has at most, unless a single row has more.
            first_numbers: See `Target`; 0 for all if there are none.
            per_block: See `row_width`.
        """
        self.longest = longest
        self._groups = groups
        self._first_numbers = first_numbers or [0] * len(variables)
        self._arrays = [[array.reshape(-1) for array in arrays] for arrays in variables]
        # Scales are [num_blocks], or [num_rows, num_blocks] where blocks end at rows.
        dims = [arrays[-1].ndim if per_block else 0 for arrays in variables]
        self._are_blocks, self._are_tables = (
            np.array([each == ndim for each in dims]) for ndim in (1, 2)
        )
        widths = [row_width(arrays, per_block=per_block) for arrays in variables]
        self._widths = np.array(widths, np.intp)
        self._sizes = np.array([arrays[0].size for arrays in variables], np.intp)
        heights = -(-self._sizes // self._widths)
        # How many numbers each array has for a row.
        self._counts = [
            [width if each.size == arrays[0].size else each.size // height for each in arrays]
            for arrays, width, height in zip(variables, widths, heights.tolist(), strict=True)
        ]
        counts = -(-heights // np.maximum(longest // self._widths, 1))
        lengths = -(-heights // counts)
        # For each chunk, the position of its variable and the bounds of its rows. Nothing else is
        # kept: a billion elements are thousands of chunks.
        self._owners = np.repeat(np.arange(len(variables)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = (np.arange(len(before)) - before) * lengths[self._owners]
        self._ends = np.minimum(self._starts + lengths[self._owners], heights[self._owners])

    def __len__(self) -> int:
        return len(self._owners)

    def share(self, update: Callable[[int], None], left: deque[int]) -> None:
        """Updates chunks until none is left; threads that call it at once share them.

        `update` is called with the number of each chunk in `left`, which all callers share.
        """
        while left:
            try:
                number = left.popleft()
            except IndexError:  # another thread took the last one
                return
            update(number)

    def group(self, number: int) -> int:
        """Returns the number of a chunk's group."""
        return self._groups[int(self._owners[number])]

    def first_number(self, number: int) -> int:
        """Returns the first number of a chunk's variable; see `Target`."""
        return self._first_numbers[int(self._owners[number])]

    def part(
        self, number: int, gradients: Sequence[Array] | None
    ) -> tuple[list[Array], Array | None, int]:
        """Returns the arrays of a chunk, its gradient, and the number of its first element.

        The arrays are flat, or [num_rows, ...] where blocks of codes end at rows.

        Args:
            number: The chunk's.
            gradients: A flat one for each variable; None if they are zero everywhere.
        """
        owner = self._owners[number]
        start, end = int(self._starts[number]), int(self._ends[number])
        arrays = [
            array[start * count : end * count]
            for array, count in zip(self._arrays[owner], self._counts[owner], strict=True)
        ]
        if self._are_tables[owner]:
            arrays = [array.reshape(end - start, -1) for array in arrays]
        width = int(self._widths[owner])
        grad = None if gradients is None else gradients[owner][start * width : end * width]
        return arrays, grad, start * width

    def table(self, gradients: Array | None, itemsize: int = 0) -> Array:
        """Returns the chunks, as `Table` takes them.

        `gradients`, of intp, are where each variable's begins; None if all are zero.
        """
        table = self._table.copy()
        if gradients is not None:
            offsets = table[:, _FIRST] * itemsize
            np.add(gradients[self._owners], offsets, out=table[:, _GRADIENT])
        return table

    def num_of_first(self, num_variables: int) -> int:
        """Returns the number of chunks of the first variables."""
        return int(np.searchsorted(self._owners, num_variables))

    @computed_once
    def _table(self) -> Array:
        """The table of chunks, without the addresses of gradients."""
        addresses = [[array.ctypes.data for array in arrays] for arrays in self._arrays]
        bytes_of_rows = [
            [array.itemsize * count for array, count in zip(arrays, counts, strict=True)]
            for arrays, counts in zip(self._arrays, self._counts, strict=True)
        ]
        starts = self._starts[:, np.newaxis]
        arrays = np.array(addresses, np.intp)[self._owners]
        arrays += starts * np.array(bytes_of_rows, np.intp)[self._owners]
        widths, heights = self._widths[self._owners], self._ends - self._starts
        firsts = self._starts * widths
        # The blocks of a flat variable are one row for C++.
        are_blocks = self._are_blocks[self._owners]
        sizes = np.minimum(self._ends * widths, self._sizes[self._owners]) - firsts
        widths, heights = np.where(are_blocks, (sizes, np.ones_like(sizes)), (widths, heights))
        none = np.zeros_like(firsts)
        numbers = np.array(self._first_numbers, np.intp)[self._owners]
        groups = np.array(self._groups, np.intp)[self._owners]
        return np.column_stack([arrays, none, heights, widths, firsts, numbers, groups])
