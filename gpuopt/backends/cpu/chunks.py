"""Large variables, cut into chunks that threads share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Target
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.memory import Array, scratch
from gpuopt.computed_once import computed_once

# Columns of a table of chunks: see `CompiledRule.update_chunks`.
_GRADIENT, _WIDTH, _SCALARS = -4, -2, -1
# The most memory that the scratch arrays of all threads may take together.
_SCRATCH_BYTES = 6 * 1024 * 1024


def chunk_length(form: RuleForm, size: int, threads: int, converted_bytes: int = 0) -> int:
    """Returns how long chunks should be.

    Args:
        form: The rule's form that updates them.
        size: How many elements are updated in all.
        threads: How many threads share the chunks.
        converted_bytes: How many bytes a thread needs for each element to convert between types.
    """
    scratch_bytes = converted_bytes + sum(dtype.itemsize for dtype in form.scratch_dtypes)
    longest = min(form.most_elements, -(-size // threads))
    if scratch_bytes:
        longest = min(longest, _SCRATCH_BYTES // (threads * scratch_bytes))
    return max(longest, 1)


class Chunks:
    """Large variables and their slots, cut into chunks of whole rows; see `Target.row_width`.

    Attributes:
        longest: As it was given.
    """

    def __init__(self, targets: Sequence[Target], groups: Sequence[int], longest: int) -> None:
        """Cuts variables.

        Args:
            targets: The variables and their slots, contiguous and not empty.
            groups: The number of each one's group.
            longest: How many elements a chunk has at most, unless a single row has more.
        """
        self.longest = longest
        self._groups = groups
        widths = np.array([target.row_width for target in targets], np.intp)
        sizes = np.array([var.size for var, _ in targets], np.intp)
        heights = sizes // widths
        self._written = [
            [array.reshape(height, -1) for array in (var, *slots)]
            for (var, slots), height in zip(targets, heights, strict=True)
        ]
        counts = -(-heights // np.maximum(longest // widths, 1))
        lengths = -(-heights // counts)
        # For each chunk, the position of its variable and the bounds of its rows. Nothing else is
        # kept: a billion elements are thousands of chunks.
        self._owners = np.repeat(np.arange(len(targets)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = (np.arange(len(before)) - before) * lengths[self._owners]
        self._ends = np.minimum(self._starts + lengths[self._owners], heights[self._owners])

    def __len__(self) -> int:
        return len(self._owners)

    def update(
        self,
        forms: Sequence[RuleForm],
        real: np.dtype[Any],
        gradients: Sequence[Array | None] | None,
        left: deque[int],
    ) -> None:
        """Updates chunks until none is left; threads that call it at once share them.

        Args:
            forms: The rule's form of each group.
            real: The type that they compute in.
            gradients: A flat gradient for each target, or None to leave the target out. None
                instead of the sequence stands for gradients that are zero everywhere.
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
                form = forms[self._groups[owner]]
                written = [array[part].reshape(-1) for array in self._written[owner]]
                if gradient is not None:
                    gradient = gradient.reshape(self._written[owner][0].shape)[part].reshape(-1)
                _update_chunk(form, real, written, gradient)

    def table(self, scalars: Sequence[int], gradients: Sequence[Array | None] | None) -> Array:
        """Returns the chunks' addresses, for `CompiledRule.update_chunks`.

        Args:
            scalars: Where each group's scalars are.
            gradients: See `update`.
        """
        table = self._table.copy()
        if len(scalars) == 1:
            table[:, _SCALARS] = scalars
        else:
            table[:, _SCALARS] = np.array(scalars, np.intp)[self._chunk_groups]
        if gradients is not None:
            addresses = [0 if gradient is None else gradient.ctypes.data for gradient in gradients]
            grads = np.array(addresses, np.intp)[self._owners]
            np.add(grads, self._offsets[:, 0], out=table[:, _GRADIENT])
            if 0 in addresses:
                table = table[grads != 0]
        return table

    def numbered_table(self, scalars: Sequence[int], gradients: Sequence[Array] | None) -> Array:
        """Returns the chunks' addresses, for `CompiledMixed.update_chunks`.

        Precondition: rows have one element.

        Args:
            scalars: Where each target's scalars are.
            gradients: One for each target, contiguous and all of one type; None if they are zero
                everywhere.
        """
        table = self._table.copy()
        if gradients is not None:
            grads = np.array([gradient.ctypes.data for gradient in gradients], np.intp)
            table[:, _GRADIENT] = grads[self._owners] + self._starts * gradients[0].itemsize
        table[:, _WIDTH] = self._starts
        table[:, _SCALARS] = np.array(scalars, np.intp)[self._owners]
        return table

    @computed_once
    def _offsets(self) -> Array:
        """For each chunk, how many bytes of each of its arrays lie before it."""
        bytes_of_rows = [[array[0].nbytes for array in arrays] for arrays in self._written]
        offsets: Array = self._starts[:, np.newaxis] * np.array(bytes_of_rows)[self._owners]
        return offsets

    @computed_once
    def _chunk_groups(self) -> Array:
        """For each chunk, the number of its group."""
        groups: Array = np.array(self._groups, np.intp)[self._owners]
        return groups

    @computed_once
    def _table(self) -> Array:
        """The chunks' addresses, without gradients and scalars."""
        addresses = [[array.ctypes.data for array in arrays] for arrays in self._written]
        written = np.array(addresses, np.intp)[self._owners] + self._offsets
        widths = np.array([arrays[0][0].size for arrays in self._written])[self._owners]
        none = np.zeros_like(self._starts)
        return np.column_stack([written, none, self._ends - self._starts, widths, none])


def _update_chunk(
    form: RuleForm, real: np.dtype[Any], written: Sequence[Array], grad: Array | None
) -> None:
    """Updates chunks of any type that converts to `real`, and back."""
    given = [*written, *([] if grad is None else [grad])]
    others = [chunk for chunk in given if chunk.dtype != real]
    arrays = scratch([*[real] * len(others), *form.scratch_dtypes], len(written[0]))
    copies = iter(arrays)
    converted = [chunk if chunk.dtype == real else next(copies)[: len(chunk)] for chunk in given]
    for array, chunk in zip(converted, given, strict=True):
        if array is not chunk:
            np.copyto(array, chunk, casting="unsafe")
    form.apply(
        converted[: len(written)],
        None if grad is None else converted[-1],
        arrays[len(others) :],
    )
    for array, chunk in zip(converted, written, strict=False):
        if array is not chunk:
            np.copyto(chunk, array, casting="unsafe")
