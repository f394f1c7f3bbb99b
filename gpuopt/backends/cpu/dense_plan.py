"""How variables in host memory are cut into tasks: large ones in chunks, small ones in bundles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, eq
from typing import Any

import numpy as np

from gpuopt.backends.backend import Target, compute_type
from gpuopt.backends.cpu.bundles import bundles
from gpuopt.backends.cpu.chunks import Chunks, chunk_length
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array
from gpuopt.backends.cpu.written_memory import WrittenMemory
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
        groups: For each of them, the number of its group, whose forms and scalars it gets.
        memory: Theirs, and that of `copies`.
        copies: The arrays that get the new values, too, if the variables are master copies.
        is_mixed: Whether some of these arrays have another type than `real`.
        read_late: The positions of gradients that are read after the first write.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        memory: WrittenMemory,
        limits: CpuLimits,
        groups: Sequence[int] | None = None,
        copies: Sequence[Array] = (),
    ) -> None:
        """Sorts the variables.

        Args:
            targets: The variables and their slots.
            memory: The memory of all these arrays.
            limits: See `CpuLimits`.
            groups: See `Backend.plan_dense`.
            copies: Likewise.
        """
        stored = targets[0].var.dtype
        self.real = np.dtype(compute_type(stored))
        self.size = sum(var.size for var, _ in targets)
        self.targets = targets
        self.groups = groups or [0] * len(targets)
        self.memory = memory
        self._limits = limits
        self._shapes = [var.shape for var, _ in targets]
        self.copies = copies
        self._dtype = copies[0].dtype if copies else stored
        types = [array.dtype for array in (targets[0].var, *targets[0].slots)]
        converted = sum(each != self.real for each in [*types, stored])  # and the gradient
        self._converted_bytes = converted * self.real.itemsize
        self.is_mixed = bool(converted or copies)
        self._strided: list[int] = []
        self._large: list[int] = []
        small: list[int] = []
        for position, (var, slots) in enumerate(targets):
            written = zip((var, *slots), types, strict=True)
            if not all(array.flags.carray and array.dtype == each for array, each in written):
                self._strided.append(position)
            elif var.size:
                (small if var.size < limits.small_elements else self._large).append(position)
        # These are small for numpy alone.
        medium = range(limits.small_compiled_elements, limits.small_elements)
        self._has_medium = any(targets[position].var.size in medium for position in small)
        self._chunks = self._whole_chunks = Chunks([], [], 0)
        self._bundles = bundles(targets, self.groups, small, _BUNDLE_BYTES // self.real.itemsize)
        small_bytes = stored.itemsize * sum(targets[position].var.size for position in small)
        self._copies_small = small_bytes <= _COPIED_BYTES
        # Gradients read after the first write: those that alias a variable or slot are copied.
        self.read_late = [*self._large, *self._strided, *([] if self._copies_small else small)]

    @property
    def is_strided(self) -> bool:
        """Whether some arrays do not lie flat in memory, or have another dtype than the first."""
        return bool(self._strided)

    @property
    def is_large(self) -> bool:
        """Whether all variables with elements are large, and lie flat in memory."""
        return not (self._strided or self._bundles)

    @property
    def beside(self) -> Sequence[Array]:
        """The arrays that are written with the variables, one for each, if there are any."""
        return self.copies

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
        return DensePlan(self.targets, self.memory, self._limits, range(len(self.targets)))

    def for_forms(self, forms: Sequence[RuleForm]) -> DensePlan:
        """Returns the plan of the same variables that suits forms of a rule best."""
        converts = self._converted_bytes or self._dtype != self.real
        is_other = self._has_medium and not converts and forms[0].update_chunks is not None
        return self._for_compiled if is_other else self

    @computed_once
    def _for_compiled(self) -> DensePlan:
        """The plan of the same variables of which fewer count as small."""
        limits = replace(self._limits, small_elements=self._limits.small_compiled_elements)
        return DensePlan(self.targets, self.memory, limits, self.groups, self.copies)

    def without_overlap(self, gradients: Sequence[Array]) -> list[Array]:
        """Returns the gradients; those that the step would overwrite before reading are copies."""
        apart = list(gradients)
        for position in self.read_late:
            if self.memory.overlaps(apart[position]):
                apart[position] = apart[position].copy()
        return apart

    def whole_chunks(self, longest: int) -> Chunks:
        """Cuts all variables that have elements, with their slots and what is beside them.

        Precondition: all of that lies flat in memory.
        """
        if self._whole_chunks.longest != longest:
            targets = [
                Target(var, [*slots, *self.beside[position : position + 1]])
                for position, (var, slots) in enumerate(self.targets)
                if var.size
            ]
            # Each has its own scalars: see `Chunks.numbered_table`.
            self._whole_chunks = Chunks(targets, range(len(targets)), longest)
        return self._whole_chunks

    def in_rows(self, gradients: Sequence[Array]) -> list[Array]:
        """Returns the gradients; where large variables have others than rows, copies in rows."""
        in_rows = list(gradients)
        for position in self._large:
            in_rows[position] = np.require(in_rows[position], requirements=["C", "ALIGNED"])
        return in_rows

    def tasks(
        self, forms: Sequence[RuleForm], gradients: Sequence[Array], threads: int
    ) -> tuple[list[Task], list[int]]:
        """Cuts a step into tasks that write to different memory.

        The caller keeps the gradients until the tasks are done.

        Args:
            forms: The rule's form of each group, all of one kind.
            gradients: One for each target.
            threads: How many share the tasks.

        Returns:
            (tasks, strided): the positions of targets that are not flat in memory, or whose
            gradients are not.
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
        for bundle in self._bundles:
            join = partial(bundle.join, gradients, self.real)
            grad = join() if self._copies_small else join
            small.append(partial(bundle.update, forms, self.real, grad))
        # One large task first: another thread can run it without the interpreter's lock while this
        # one updates the small variables in Python.
        large = self._large_tasks(forms, flat, threads) if self._large else []
        return [*large[:1], *small, *large[1:]], strided

    def tasks_without_gradients(self, forms: Sequence[RuleForm], threads: int) -> list[Task]:
        """Cuts a step, whose gradients are zero everywhere, into tasks.

        Precondition: `is_large`.
        """
        return self._large_tasks(forms, None, threads) if self._large else []

    def _large_tasks(
        self, forms: Sequence[RuleForm], gradients: Sequence[Array | None] | None, threads: int
    ) -> list[Task]:
        types = {each.dtype for each in gradients or () if each is not None}
        converted_bytes = self._converted_bytes or len(types - {self.real}) * self.real.itemsize
        # Forms of one kind differ in their scratch arrays alone.
        distinct = {tuple(form.scratch_dtypes): form for form in forms}.values()
        longest = min(chunk_length(form, self.size, threads, converted_bytes) for form in distinct)
        chunks = self._chunks
        if chunks.longest != longest:
            targets = [self.targets[position] for position in self._large]
            groups = [self.groups[position] for position in self._large]
            chunks = self._chunks = Chunks(targets, groups, longest)
        share: Task
        update_chunks = forms[0].update_chunks
        if update_chunks is not None and not converted_bytes:
            table = chunks.table([form.scalars_address for form in forms], gradients)
            share = partial(update_chunks, table, np.zeros(1, np.int64))
        else:
            share = partial(chunks.update, forms, self.real, gradients, deque(range(len(chunks))))
        return [share] * min(threads, len(chunks))
