"""Updates of whole rows in host memory, for rules with numbers of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.cpu.forms.compiled import CompiledRule
from gpuopt.backends.cpu.forms.compiled_catch_up import CompiledCatchUp
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.row_groups import RowGroups
from gpuopt.backends.cpu.threads import share_out
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

# Loading a row from a random place in memory costs several times as much as its arithmetic.
ROW_FACTOR = 4


def update_compiled(
    compiled: CompiledRule,
    written: Sequence[Array],
    values: Array,
    groups: RowGroups,
    threads: int,
    late: CompiledCatchUp | None = None,
) -> None:
    """Adds up each row's values and updates the row, in one pass.

    Args:
        compiled: What to compute.
        written: [height, ...], variable and slots, contiguous.
        values: [num_rows, ...], contiguous, in other memory.
        groups: Which values belong to which row.
        threads: How many share the rows.
        late: Brings the rows up to date first, in the same pass; None if they are.
    """
    if late is None:
        update = compiled.row_update(written, values, groups)
    else:
        update = late.row_update(compiled, written, values, groups)
    num_rows = len(groups.rows)
    # Threads that share the rows end at about the same time; one alone makes one call.
    height = -(-num_rows // (4 * threads)) if threads > 1 else num_rows
    share_out(
        lambda first: update(first, min(first + height, num_rows)),
        range(0, num_rows, height),
        threads,
    )


def update_rows(
    rule: UpdateRule,
    written: Sequence[Array],
    rows: Array | None,
    sums: Array,
    scalars: Scalars,
    limits: CpuLimits,
) -> None:
    """Applies a row-wise rule as it is written, to copies of some rows at a time.

    Args:
        rule: What to compute.
        written: [height, ...], variable and slots, of any strides and dtypes.
        rows: [num_rows], unique: what is updated; None for all, in order.
        sums: [num_rows, ...], their gradients, in other memory.
        scalars: The rule's.
        limits: See `CpuLimits`.
    """
    real = compute_type(written[0].dtype)
    form = PlainRule(rule, scalars)
    height = max(PlainRule.most_elements // max(sums[0].size, 1), 1)

    def update(first: int) -> None:
        part: Any = slice(first, first + height)
        grad = sums[part].astype(real, copy=False).reshape(-1)
        if rows is not None:
            part = rows[part]
        held = [np.array(array[part], real, order="C") for array in written]
        form.apply([array.reshape(-1) for array in held], grad, [])
        for array, new in zip(written, held, strict=True):
            array[part] = new

    is_large = sums.size * ROW_FACTOR >= limits.large_elements
    threads = limits.threads_for(sums.size * ROW_FACTOR) if is_large else 1
    share_out(update, range(0, len(sums), height), threads)
