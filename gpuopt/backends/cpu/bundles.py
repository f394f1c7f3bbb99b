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

from gpuopt.backends.backend import Target
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.memory import Array, contiguous_runs, scratch

_ALL = slice(None)
_exhaust: Callable[[Iterable[None]], object] = partial(deque, maxlen=0)
_assign: Any = setitem  # typed as if memoryviews could not be written


def bundles(
    targets: Sequence[Target], groups: Sequence[int], positions: Sequence[int], most_elements: int
) -> list[Bundle]:
    """Joins neighbours in a list, each group by itself.

    Args:
        targets: All variables of a plan, and their slots.
        groups: The number of each one's group.
        positions: Those of `targets` that are joined.
        most_elements: How many elements the variables of a bundle have together, unless one alone
            has more.
    """
    made: list[Bundle] = []
    first = size = 0
    positions = sorted(positions, key=lambda position: groups[position])
    for last, position in enumerate(positions):
        size += targets[position].var.size
        following = positions[last + 1 : last + 2]
        if (
            not following
            or groups[following[0]] != groups[position]
            or size + targets[following[0]].var.size > most_elements
        ):
            members = positions[first : last + 1]
            of_members = [targets[member] for member in members]
            made.append(Bundle(of_members, members, groups[position]))
            first, size = last + 1, 0
    return made


class Bundle:
    """Small variables that are updated together, as if they were one.

    Attributes:
        group: The number of their group.
    """

    def __init__(self, targets: Sequence[Target], positions: Sequence[int], group: int) -> None:
        self.group = group
        self._positions = positions
        self._size = sum(var.size for var, _ in targets)
        var_and_slots = zip(*[(var, *slots) for var, slots in targets], strict=True)
        self._members = [
            _Members(contiguous_runs([array.reshape(-1) for array in arrays]))
            for arrays in var_and_slots
        ]

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
        self, form: RuleForm, real: np.dtype[Any], grad: Array | Callable[[], Array]
    ) -> None:
        """Updates the variables.

        Args:
            form: The rule's form that updates them.
            real: The type that the form computes in.
            grad: The result of `join`, or a function that calls `join` and returns its result.
        """
        grad = grad() if callable(grad) else grad
        gathered = [len(each.runs) > 1 or each.dtype != real for each in self._members]
        wanted = [*[real] * sum(gathered), *form.scratch_dtypes]
        buffers = scratch(wanted, self._size) if wanted else []
        written = [
            each.gather(buffers.pop(0)) if is_gathered else each.runs[0]
            for each, is_gathered in zip(self._members, gathered, strict=True)
        ]
        form.apply(written, grad, buffers)
        for each, values, is_gathered in zip(self._members, written, gathered, strict=True):
            if is_gathered:
                each.spread(values)


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
        self._bytes = [run.view(np.uint8).data for run in runs]
        self._cut = struct.Struct("".join(f"{run.nbytes}s" for run in runs)).unpack

    def gather(self, out: Array) -> Array:
        """Copies the arrays into `out`, which may be of another dtype, and returns it."""
        out[...] = np.frombuffer(b"".join(self._bytes), self.dtype)
        return out

    def spread(self, values: Array) -> None:
        """Copies what `gather` returned back into the arrays."""
        parts = self._cut(values.astype(self.dtype, copy=False).view(np.uint8).data)
        _exhaust(map(_assign, self._bytes, repeat(_ALL), parts))
