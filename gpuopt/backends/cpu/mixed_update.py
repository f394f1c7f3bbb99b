"""Updates of large variables with arrays that are not all float32, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.compiled import CompiledRule
from gpuopt.backends.cpu.forms.compiled_mixed import CompiledMixed, StoredTypes, mixed_library
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array
from gpuopt.backends.cpu.summed_scalars import scalars_with_sums
from gpuopt.backends.cpu.threads import share_out
from gpuopt.rules.rounded import BFLOAT16
from gpuopt.rules.update_rule import UpdateRule

_FLOAT = np.dtype(np.float32)


def update_mixed(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array] | None,
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> bool:
    """Does what `Backend.apply_dense` does, with what a plan has beside its variables.

    Args:
        rule: See there.
        plan: See there.
        gradients: See there; None if they are zero everywhere.
        scalars: See there.
        limits: See `CpuLimits`.

    Returns:
        Whether it did: not for small updates, rules with slots of rows, arrays that do not lie flat
        in memory, sums over variables that are halves, and where nothing can be compiled.
    """
    if plan.size < max(limits.compiled_elements, 1) or plan.real != _FLOAT or rule.row_slots:
        return False
    types = _types_of(plan, gradients)
    if types is None or (rule.is_rounded and set(types.slots[rule.is_averaged :]) - {BFLOAT16}):
        return False
    if rule.sums and (gradients is None or types.are_halves):
        return False
    library = mixed_library(rule, types)
    if library is None:
        return False
    groups = plan.groups
    if rule.sums and gradients is not None:
        scalars = scalars_with_sums(rule, plan, gradients, scalars, limits)
        groups = range(len(scalars))
    compiled = CompiledMixed(library, rule, scalars)
    flat = None if gradients is None else _flat(plan, gradients)
    threads = limits.threads_for(plan.size)
    longest = min(CompiledRule.most_elements, -(-plan.size // threads))
    of_groups = compiled.scalars_addresses
    addresses = [
        of_groups[group] for group, (var, _) in zip(groups, plan.targets, strict=True) if var.size
    ]
    table = plan.whole_chunks(longest).numbered_table(addresses, flat)
    taken = np.zeros(1, np.int64)
    share_out(lambda _: compiled.update_chunks(table, taken), range(threads), threads)
    return True


def _flat(plan: DensePlan, gradients: Sequence[Array]) -> list[Array]:
    """Returns the gradients that have elements: copies of those that overlap, or are not flat."""
    overlaps = plan.memory.overlaps
    return [
        np.require(each.copy() if overlaps(each) else each, requirements=["C", "ALIGNED"])
        for each in gradients
        if each.size
    ]


def _types_of(plan: DensePlan, gradients: Sequence[Array] | None) -> StoredTypes | None:
    """Returns the types of a step's arrays, if they are such as can be updated in one pass."""
    beside, [(var, slots), *_] = plan.beside, plan.targets
    types = StoredTypes(
        var.dtype,
        beside[0].dtype if beside else None,
        gradients[0].dtype if gradients else None,
        tuple(each.dtype for each in slots),
    )
    are_flat = not plan.is_strided and all(each.flags.carray for each in beside)
    are_alike = len({each.dtype for each in gradients or ()}) <= 1
    return types if are_flat and are_alike and types.are_known else None
