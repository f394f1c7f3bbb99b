"""Small variables, joined into bundles that one call updates."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from gpuopt.backends.cpu.chunks import row_width
from gpuopt.backends.cpu.forms.replayed import form_of_parts
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.memory import Array, contiguous_runs, scratch
from gpuopt.codecs import Codecs

_ALL = slice(None)
_exhaust: Callable[[Iterable[None]], object] = partial(deque, maxlen=0)
_assign: Any = setitem  # typed as if memoryviews could not be written


def bundles(
    variables: Sequence[Sequence[Array]],
    codecs: Codecs,
    groups: Sequence[int],
    positions: Sequence[int],
    most_elements: int,
) -> list[Bundle]:
    """Joins neighbours in a list, with those of one group and `row_width` side by side.

    Args:
        variables: The arrays of all variables of a plan and their slots.
        codecs: How these are stored, all without blocks.
        groups: The number of each one's group.
        positions: Those of `variables` that are joined.
        most_elements: How many elements the variables of a bundle have together, unless one alone
            has more.
    """
    made: list[Bundle] = []
    first = size = 0
    kinds = {
        position: (groups[position], row_width(variables[position], per_block=0))
        for position in positions
    }
    positions = sorted(positions, key=kinds.__getitem__)
    for last, position in enumerate(positions):
        size += variables[position][0].size
        following = positions[last + 1 : last + 2]
        if not following or size + variables[following[0]][0].size > most_elements:
            members = positions[first : last + 1]
            made.append(
                Bundle(
                    [variables[member] for member in members],
                    codecs,
                    [kinds[member] for member in members],
                    members,
                )
            )
            first, size = last + 1, 0
    return made


class Bundle:
    """Small variables that are updated together: those of each part as if they were one.

    A part has one group and one `row_width`.
    """

    def __init__(
        self,
        variables: Sequence[Sequence[Array]],
        codecs: Codecs,
        kinds: Sequence[tuple[int, int]],
        positions: Sequence[int],
    ) -> None:
        """Joins variables.

        Args:
            variables: Their arrays, and those of their slots.
            codecs: How these are stored.
            kinds: The group and the row width of each.
            positions: Theirs in the plan.
        """
        self._positions = positions
        self._codecs = codecs
        self._size = sum(arrays[0].size for arrays in variables)
        parts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        self._groups = [kinds[i][0] for i in parts]
        every = list(zip(*variables, strict=True))
        self._members = [
            _Members(contiguous_runs([array.reshape(-1) for array in arrays])) for arrays in every
        ]
        ends = [np.cumsum([0, *[array.size for array in arrays]]) for arrays in every]
        # The numbers of a codec have the bounds of its first array.
        firsts = np.cumsum([0, *[codec.num_arrays for codec in codecs.every[:-1]]])
        ends = [ends[first] for first in firsts]
        # [num_slots + 2, num_parts + 1]: where the elements of each part begin and end in the
        # variable, the slots and the gradient.
        self._bounds = np.array([each[[*parts, len(variables)]] for each in [*ends, ends[0]]])

    def join(self, gradients: Sequence[Array], real: np.dtype[Any]) -> Array:
        """Copies the gradients into one flat array of the compute type."""
        members: list[Any] = [gradients[position] for position in self._positions]
        try:
            # Much quicker than np.concatenate, but it needs C order.
            flat = np.frombuffer(b"".join(members), members[0].dtype)
        except TypeError:  # not in C order
            flat = np.concatenate(members, axis=None)
        return flat.astype(real, copy=False)

    def update(
        self, forms: Sequence[RuleForm], real: np.dtype[Any], grad: Array | Callable[[], Array]
    ) -> None:
        """Updates the variables by the rule's form of each group, all of one kind.

        `grad` is the result of `join`, or a function that calls `join` and returns its result.
        """
        grad = grad() if callable(grad) else grad
        is_plain = self._codecs.are_plain
        gathered = [each for each in self._members if len(each.runs) > 1]
        first = forms[self._groups[0]]
        decoded = [real] * self._codecs.num_decoded
        kept = [*[each.dtype for each in gathered], *decoded]
        wanted = [*kept, *first.scratch_dtypes]
        buffers = scratch(wanted, self._size) if wanted else []
        arrays = [
            each.gather(buffers.pop(0)) if len(each.runs) > 1 else each.runs[0]
            for each in self._members
        ]
        values = arrays if is_plain else self._codecs.decode(arrays, buffers)
        del buffers[: len(decoded)]
        whole: RuleForm | None = first
        if len(self._groups) > 1:
            whole = form_of_parts(forms, self._groups, np.diff(self._bounds[-1]))
        if whole is not None:
            whole.apply(values, grad, buffers)
        else:
            self._update_parts(forms, values, grad, kept)
        if not is_plain:
            self._codecs.encode(values, arrays)
        for each, array in zip(self._members, arrays, strict=True):
            if len(each.runs) > 1:
                each.spread(array)

    def _update_parts(
        self,
        forms: Sequence[RuleForm],
        values: Sequence[Array],
        grad: Array,
        kept: Sequence[np.dtype[Any]],
    ) -> None:
        arrays = [*values, grad]
        for number, group in enumerate(self._groups):
            form = forms[group]
            *parts, part_of_grad = [
                array[bounds[number] : bounds[number + 1]]
                for array, bounds in zip(arrays, self._bounds, strict=True)
            ]
            # After those of `kept`, which are in use.
            buffers = scratch([*kept, *form.scratch_dtypes], self._size)[len(kept) :]
            form.apply(parts, part_of_grad, [array[: len(part_of_grad)] for array in buffers])


class _Members:
    """Flat arrays of one dtype that are updated as one: all variables of a bundle, or all slots.

    Many arrays apart in memory are copied as bytes, by the interpreter's own loops: a call of numpy
    for each would take longer than the update.

    Attributes:
        runs: The arrays, with those that are contiguous as one.
        dtype: Theirs.
    """

    def __init__(self, runs: Sequence[Array]) -> None:
        self.runs = runs
        self.dtype = runs[0].dtype
        self._size = sum(run.size for run in runs)
        self._bytes = [run.view(np.uint8).data for run in runs]
        self._cut = struct.Struct("".join(f"{run.nbytes}s" for run in runs)).unpack

    def gather(self, out: Array) -> Array:
        """Copies the arrays into `out`, which is at least as long, and returns what it fills."""
        joined = out[: self._size]
        joined[...] = np.frombuffer(b"".join(self._bytes), self.dtype)
        return joined

    def spread(self, values: Array) -> None:
        """Copies what `gather` returned back into the arrays."""
        parts = self._cut(values.view(np.uint8).data)
        _exhaust(map(_assign, self._bytes, repeat(_ALL), parts))
