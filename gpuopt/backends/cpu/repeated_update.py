"""An update of small variables that is repeated with gradients at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.cpu.chunks import Chunks
from gpuopt.backends.cpu.forms.compiled import CompiledRule, Table, compiled_rule
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array
from gpuopt.backends.cpu.written_memory import WrittenMemory
from gpuopt.rules.update_rule import UpdateRule

_LIMITS = CpuLimits()


def repeated_update(
    rule: UpdateRule,
    targets: Sequence[Target],
    gradients: Sequence[Array],
    groups: Sequence[int],
) -> Callable[[Sequence[Scalars]], None] | None:
    """Returns what updates all variables, given each group's scalars of their dtype.

    It calls a compiled rule with a table of addresses that was made once: to find gradients anew
    takes several times as long as to update a few thousand elements. It keeps all arrays alive.

    None where `Backend.apply_dense` has to make the update: where there is no compiler, where
    threads would share the work, and for arrays that are not flat, not of the type that rules
    compute in, or written and read.

    Args:
        rule: Without sums and slots of rows.
        targets: Variables and slots that share no memory.
        gradients: Of their shapes.
        groups: The number of each variable's group.
    """
    present = [position for position, gradient in enumerate(gradients) if gradient.size]
    targets = [targets[position] for position in present]
    gradients = [gradients[position] for position in present]
    written = [array for target in targets for array in target.arrays]
    dtypes = {array.dtype for array in (*written, *gradients)}
    if len(dtypes) != 1 or _LIMITS.threads_for(sum(each.size for each in gradients)) > 1:
        return None
    [dtype] = dtypes
    memory = WrittenMemory(written)
    if (
        dtype != compute_type(dtype)
        or not all(array.flags.carray for array in written)
        or not all(each.flags.c_contiguous and each.flags.aligned for each in gradients)
        or any(map(memory.overlaps, gradients))
    ):
        return None
    compiled = compiled_rule(rule, dtype)
    if compiled is None:
        return None
    chunks = Chunks(
        [target.arrays for target in targets],
        [groups[position] for position in present],
        compiled.most_elements,
    )
    begins = np.array([gradient.ctypes.data for gradient in gradients], np.intp)
    table = Table(chunks.table(begins, gradients[0].itemsize))
    return partial(_update, compiled, table, (targets, gradients))


def _update(
    rule: CompiledRule, table: Table, kept_alive: object, scalars: Sequence[Scalars]
) -> None:
    rule.update_chunks(table, rule.pack(scalars))
