"""Cuts variables in host memory into tasks: large ones into chunks, small ones into bundles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from gpuopt import environment
from gpuopt.backends.backend import INDEX_DTYPES, Target, accepted_dtype, compute_type
from gpuopt.backends.cpu.bundles import bundles
from gpuopt.backends.cpu.chunks import Chunks, chunk_length
from gpuopt.backends.cpu.compiled_update import CompiledUpdate
from gpuopt.backends.cpu.forms.compiled import (
    CompiledRows,
    Stored,
    addresses,
    compiled_rows,
    compiled_rule,
)
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array, WrittenMemory, scratch
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.tiles import Rounding, buffers_for, cut_short, update_tile
from gpuopt.codecs import Codecs, codec_of
from gpuopt.computed_once import computed_once
from gpuopt.rules.update_rule import UpdateRule

_BUNDLE_BYTES = 128 * 1024
# If the small gradients take no more than this together, all are copied before the first update.
_COPIED_BYTES = 1024 * 1024

Task = Callable[[], None]

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
        dtype = targets[0].var.dtype
        self.real = np.dtype(compute_type(dtype))
        self.size = sum(target.var.size for target in targets)
        self.targets, self.codecs = targets, codecs
        self.groups = groups or [0] * len(targets)
        self.memory = memory
        self._limits = limits
        self._shapes = [target.var.shape for target in targets]
        self._dtype = codecs.var.gradient_dtype
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
                is_small = size < limits.small_elements and not self.codecs.per_block
                (small if is_small else self._large).append(position)
        self._chunks = Chunks([], [], 0)
        # The variables that compiled code updates, those with joined gradients first.
        most = min(limits.small_elements, limits.small_compiled_elements)
        sizes = {at: self.arrays[at][0].size for at in (*small, *self._large)}
        self._compiled_order = sorted(sizes, key=lambda at: (sizes[at] >= most, at))
        self._num_joined = sum(size < most for size in sizes.values())
        # By rule and type of gradients; and how often a plan of few elements was asked for one.
        self._compiled: dict[tuple[UpdateRule, np.dtype[Any]], CompiledUpdate | None] = {}
        self._num_uncompiled = 0
        self._rows: dict[UpdateRule, CompiledRows | None] = {}
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

    def accept(
        self, gradients: Sequence[Any], others: Collection[np.dtype[Any]] = ()
    ) -> int | None:
        """Returns 0 if all gradients are numpy's arrays of their variables' shapes and dtype.

        A master copy's gradient has the dtype of its 16-bit variable. See `Backend`'s `DensePlan`.
        """
        dtype = self._dtype
        if others and type(gradients[0]) is np.ndarray:
            dtype = accepted_dtype(gradients[0].dtype, dtype, others)
        for gradient, shape in zip(gradients, self._shapes, strict=True):
            if type(gradient) is not np.ndarray or gradient.shape != shape:
                return None
            if gradient.dtype is not dtype and gradient.dtype != dtype:
                return None
        # The same version for all arrays: their addresses and strides are read in each step.
        return 0

    def accept_rows(self, values: Any, indices: Any) -> tuple[int, ...] | None:
        """Returns the shape of the only variable if this is a sparse gradient for it, else None."""
        [shape] = self._shapes
        if not (
            type(values) is type(indices) is np.ndarray
            and values.dtype == self._dtype
            and indices.dtype in INDEX_DTYPES
            and indices.ndim == 1
            and values.shape == (*indices.shape, *shape[1:])
        ):
            return None
        # As unsigned numbers, negative ones are greater than all others.
        unsigned = indices.view(f"u{indices.itemsize}")
        is_within = shape and (not unsigned.size or unsigned.max() < shape[0])
        return shape if is_within else None

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

    def compiled(
        self, rule: UpdateRule, gradients: Sequence[Array] | None
    ) -> CompiledUpdate | None:
        """Returns the compiled update of variables that are not `strided`; None if there is none.

        `gradients` are None if they are zero everywhere.
        """
        types = {self.real} if gradients is None else set(map(_dtype_of, gradients))
        if len(types) > 1 or not (self._compiled_order and environment.settings().compiled):
            return None
        [dtype] = types
        found = self._compiled.get((rule, dtype))
        if found is None:
            found = self._compiled[rule, dtype] = self._compile(rule, dtype)
        return found

    def is_compiled(self, rule: UpdateRule, size: int) -> bool:
        """Whether compiled code is to update so many elements, if there is a compiler."""
        if size >= self._limits.compiled_elements:
            return True
        # Compiled code of an exact rule writes the same bits.
        self._num_uncompiled += 1
        return self._num_uncompiled > self._limits.compiled_steps and rule.is_exact

    def compiled_rows(self, rule: UpdateRule) -> CompiledRows | None:
        """Returns the compiled form of a rule for the rows of the only variable."""
        if not environment.settings().compiled:
            return None
        found = self._rows.get(rule)
        if found is None:
            stored = Stored(self.codecs, codec_of(self.real, self.real))
            found = self._rows[rule] = compiled_rows(rule, self.real, stored)
        return found

    @computed_once
    def addresses(self) -> Any:
        """Where the arrays of the only variable are, as compiled code takes it."""
        [arrays] = self.arrays
        return addresses(arrays)

    def _compile(self, rule: UpdateRule, dtype: np.dtype[Any]) -> CompiledUpdate | None:
        stored, order = Stored(self.codecs, codec_of(dtype, self.real)), self._compiled_order
        compiled = compiled_rule(rule, self.real, stored)
        if compiled is None:
            return None
        return CompiledUpdate(
            compiled,
            [self.arrays[at] for at in order],
            [self.groups[at] for at in order],
            [self.targets[at].first_number for at in order],
            self.memory,
            order,
            self._num_joined,
        )

    def _with(self, limits: CpuLimits, groups: Sequence[int]) -> DensePlan:
        return DensePlan(self.targets, self.memory, limits, groups, self.codecs)

    def without_overlap(self, gradients: Sequence[Array], positions: Sequence[int]) -> list[Array]:
        """Returns the gradients; copies of those at some positions that the step would overwrite.

        So they can be read after the first write.
        """
        apart = list(gradients)
        for position in positions:
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
        converted = self.codecs.num_decoded + bool(types - {self.real})
        # Forms of one kind differ in their scratch arrays alone.
        distinct = {tuple(form.scratch_dtypes): form for form in forms}.values()
        converted_bytes = converted * self.real.itemsize
        longest = min(chunk_length(form, self.size, threads, converted_bytes) for form in distinct)
        longest = cut_short(longest, self.codecs, is_rounded=rounding is not None)
        chunks = self._chunks
        if chunks.longest != longest:
            arrays = [self.arrays[position] for position in self._large]
            groups = [self.groups[position] for position in self._large]
            numbers = [self.targets[position].first_number for position in self._large]
            per_block = self.codecs.per_block
            chunks = Chunks(arrays, groups, longest, numbers, per_block=per_block)
            self._chunks = chunks
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
    var, slots, companion, _ = target
    num_coded = sum(codec.per_block > 0 for codec in codecs.slots)
    plain, coded = slots[: len(slots) - 2 * num_coded], slots[len(slots) - 2 * num_coded :]
    pairs = zip(coded[:num_coded], coded[num_coded:], strict=True)
    return [var, *([] if companion is None else [companion]), *plain, *chain.from_iterable(pairs)]
