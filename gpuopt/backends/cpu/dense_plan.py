"""Cuts variables in host memory into tasks: large ones into chunks, small ones into bundles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, eq
from typing import Any

import numpy as np

from gpuopt.backends.backend import Target, compute_type
from gpuopt.backends.cpu.bundles import bundles
from gpuopt.backends.cpu.chunks import Chunks, chunk_length
from gpuopt.backends.cpu.forms.compiled import Stored
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array, scratch
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.tiles import Rounding, buffers_for, cut_short, update_tile
from gpuopt.backends.cpu.written_memory import WrittenMemory
from gpuopt.codecs import Codecs, codec_of
from gpuopt.computed_once import computed_once

_BUNDLE_BYTES = 128 * 1024
# If the small gradients take no more than this together, all are copied before the first update.
_COPIED_BYTES = 1024 * 1024

Task = Callable[[], None]

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


class DensePlan:
    """Variables of one dtype and their slots, sorted by how they are best updated.

    Slots may be of other dtypes. Of a subclass, those of one variable may differ from another's.

    It is valid as long as the arrays exist: updates write into them and never replace them.

    Attributes:
        real: The type that rules compute in.
        size: How many elements there are.
        targets: The variables and their slots, in order.
        codecs: How the variables and their slots are stored.
        arrays: All arrays of each variable, as `codecs` take them.
        groups: For each variable, the number of its group, whose forms and scalars it gets.
        memory: The memory of all arrays.
        strided: The positions of variables with an array that is not contiguous, or of another type
            than the first variable's.
        read_late: The positions of gradients that are read after the first write.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        memory: WrittenMemory,
        limits: CpuLimits,
        groups: Sequence[int] | None,
        codecs: Codecs,
    ) -> None:
        """Sorts the variables.

        Args:
            targets: The variables and their slots.
            memory: The memory of all these arrays.
            limits: See `CpuLimits`.
            groups: See `Backend.plan_dense`.
            codecs: Likewise.
        """
        dtype = targets[0].var.dtype
        self.real = np.dtype(compute_type(dtype))
        self.size = sum(target.var.size for target in targets)
        self.targets, self.codecs = targets, codecs
        self.groups = groups or [0] * len(targets)
        self.memory = memory
        self._limits = limits
        self._shapes = [target.var.shape for target in targets]
        self._dtype = codecs.gradient_dtype
        self.arrays = [_arrays_of(target, codecs) for target in targets]
        types = [array.dtype for array in self.arrays[0]]
        self.strided: list[int] = []
        self._large: list[int] = []
        small: list[int] = []
        for position, arrays in enumerate(self.arrays):
            written = zip(arrays, types, strict=True)
            size = arrays[0].size
            if not all(array.flags.carray and array.dtype == each for array, each in written):
                self.strided.append(position)
            elif size:
                is_small = size < limits.small_elements and not self.codecs.have_blocks
                (small if is_small else self._large).append(position)
        # These are small for numpy alone.
        medium = range(limits.small_compiled_elements, limits.small_elements)
        self._has_medium = any(self.arrays[position][0].size in medium for position in small)
        self._chunks = Chunks([], [], 0)
        most_elements = _BUNDLE_BYTES // self.real.itemsize
        self._bundles = bundles(self.arrays, self.codecs, self.groups, small, most_elements)
        small_bytes = dtype.itemsize * sum(self.arrays[position][0].size for position in small)
        self._copies_small = small_bytes <= _COPIED_BYTES
        # Gradients read after the first write: those that alias a variable or slot are copied.
        self.read_late = [*self._large, *self.strided, *([] if self._copies_small else small)]

    @property
    def is_large(self) -> bool:
        """Whether all variables with elements are large, and lie flat in memory."""
        return not (self.strided or self._bundles)

    def accept(self, gradients: Sequence[Any]) -> int | None:
        """Returns 0 if all gradients are numpy's arrays of their variables' shapes and dtype.

        A master copy's gradient has the dtype of its 16-bit variable.
        """
        fit = (
            set(map(type, gradients)) == {np.ndarray}
            and set(map(_dtype_of, gradients)) == {self._dtype}
            # Not as lists: thousands of tuples at once would set off the garbage collection.
            and all(map(eq, map(_shape_of, gradients), self._shapes))
        )
        # The same version for all arrays: their addresses and strides are read in each step.
        return 0 if fit else None

    @computed_once
    def alone(self) -> DensePlan:
        """A plan of the same variables, each in a group of its own."""
        return self._with(self._limits, range(len(self.targets)))

    @computed_once
    def apart(self) -> DensePlan:
        """A plan of the same variables that counts none as small."""
        if not self._bundles:
            return self
        limits = replace(self._limits, small_elements=0, small_compiled_elements=0)
        return self._with(limits, self.groups)

    def for_forms(self, forms: Sequence[RuleForm]) -> DensePlan:
        """Returns the plan of the same variables that is best for forms of a rule."""
        stored = forms[0].stored
        if stored is None:
            return self
        if not stored.is_plain:
            return self.apart
        is_other = self._has_medium and self.codecs.are_plain and self._dtype == self.real
        return self._for_compiled if is_other else self

    @computed_once
    def _for_compiled(self) -> DensePlan:
        """A plan of the same variables that counts fewer as small."""
        limits = replace(self._limits, small_elements=self._limits.small_compiled_elements)
        return self._with(limits, self.groups)

    def _with(self, limits: CpuLimits, groups: Sequence[int]) -> DensePlan:
        return DensePlan(self.targets, self.memory, limits, groups, self.codecs)

    def stored(self, gradients: Sequence[Array] | None) -> Stored | None:
        """Returns how the arrays of an update are stored; None if gradients have several types.

        Args:
            gradients: One for each variable; None if they are zero everywhere.
        """
        types = {self.real} if gradients is None else set(map(_dtype_of, gradients))
        if len(types) > 1:
            return None
        [dtype] = types
        return Stored(self.codecs, codec_of(dtype, self.real))

    def without_overlap(self, gradients: Sequence[Array]) -> list[Array]:
        """Returns the gradients; those that the step would overwrite before reading are copies."""
        apart = list(gradients)
        for position in self.read_late:
            if self.memory.overlaps(apart[position]):
                apart[position] = apart[position].copy()
        return apart

    def tasks(
        self,
        forms: Sequence[RuleForm],
        gradients: Sequence[Array] | None,
        threads: int,
        rounding: Sequence[Rounding] | None = None,
    ) -> list[Task]:
        """Cuts the step of all variables that are not `strided` into tasks.

        Tasks write to different memory. The caller keeps the gradients until they are done.

        Args:
            forms: The rule's form of each group, all of one kind.
            gradients: One for each target, those of large variables flat; None if they are zero
                everywhere, which requires `is_large`.
            threads: How many share the tasks.
            rounding: How each group's variables are rounded at random, which requires that none is
                small; None if they are not.
        """
        small: list[Task] = []
        for bundle in self._bundles:
            assert gradients is not None, "all variables are large"
            join = partial(bundle.join, gradients, self.real)
            grad = join() if self._copies_small else join
            small.append(partial(bundle.update, forms, self.real, grad))
        # One large task first: another thread can run it without the interpreter's lock while this
        # one updates the small variables in Python.
        large = self._large_tasks(forms, gradients, threads, rounding) if self._large else []
        return [*large[:1], *small, *large[1:]]

    def flat(self, gradients: Sequence[Array]) -> list[Array]:
        """Returns the gradients; those of large variables are flat, copied if need be."""
        flat = list(gradients)
        for position in self._large:
            flat[position] = np.require(flat[position], requirements=["C", "ALIGNED"]).reshape(-1)
        return flat

    def _large_tasks(
        self,
        forms: Sequence[RuleForm],
        gradients: Sequence[Array] | None,
        threads: int,
        rounding: Sequence[Rounding] | None,
    ) -> list[Task]:
        mine = None if gradients is None else [gradients[position] for position in self._large]
        types = {each.dtype for each in mine or ()}
        update_chunks = forms[0].update_chunks
        if forms[0].stored != self.stored(mine):
            update_chunks = None
        converted = 0
        if update_chunks is None:
            converted = self.codecs.num_decoded + bool(types - {self.real})
        # Forms of one kind differ in their scratch arrays alone.
        distinct = {tuple(form.scratch_dtypes): form for form in forms}.values()
        converted_bytes = converted * self.real.itemsize
        longest = min(chunk_length(form, self.size, threads, converted_bytes) for form in distinct)
        if update_chunks is None:
            longest = cut_short(longest, self.codecs, is_rounded=rounding is not None)
        chunks = self._chunks
        if chunks.longest != longest:
            arrays = [self.arrays[position] for position in self._large]
            groups = [self.groups[position] for position in self._large]
            numbers = [self.targets[position].first_number for position in self._large]
            have_blocks = self.codecs.have_blocks
            chunks = self._chunks = Chunks(
                arrays, groups, longest, numbers, have_blocks=have_blocks
            )
        share: Task
        if update_chunks is not None:
            table = chunks.table([form.scalars_address for form in forms], mine)
            share = partial(update_chunks, table, np.zeros(1, np.int64))
        else:
            update = partial(self._update_chunk, chunks, forms, mine, rounding)
            share = partial(chunks.share, update, deque(range(len(chunks))))
        return [share] * min(threads, len(chunks))

    def _update_chunk(
        self,
        chunks: Chunks,
        forms: Sequence[RuleForm],
        gradients: Sequence[Array] | None,
        rounding: Sequence[Rounding] | None,
        number: int,
    ) -> None:
        group = chunks.group(number)
        arrays, grad, first = chunks.part(number, gradients)
        form, size = forms[group], arrays[0].size
        types = buffers_for(form, self.codecs, self.real, None if grad is None else grad.dtype)
        numbers = Numbers(first, size, of_variable=chunks.first_number(number))
        rounds = None if rounding is None else rounding[group]
        buffers = scratch(types, size)
        update_tile(form, self.codecs, self.real, arrays, grad, buffers, numbers, rounds)


def _arrays_of(target: Target, codecs: Codecs) -> Sequence[Array]:
    """Returns the arrays of a variable and its slots, as `Codecs` take them."""
    var, slots, beside, _ = target
    num_coded = sum(codec.has_blocks for codec in codecs.slots)
    plain, coded = slots[: len(slots) - 2 * num_coded], slots[len(slots) - 2 * num_coded :]
    pairs = zip(coded[:num_coded], coded[num_coded:], strict=True)
    return [var, *([] if beside is None else [beside]), *plain, *chain.from_iterable(pairs)]
