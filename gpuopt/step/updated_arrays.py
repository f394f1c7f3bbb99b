"""The arrays that an update of a variable writes: its own, its slots', and a master copy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from gpuopt.backends import Target
from gpuopt.backends.backend import codecs_of
from gpuopt.codecs import Codecs, MasterAndCopy
from gpuopt.rules.slot_codes import scales_name
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.masters import SplitPair, paired
from gpuopt.state.slot_codecs import MASTER, SlotCodecs, has_master
from gpuopt.state.state import State
from gpuopt.step.options import Options
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

_FLOAT = np.dtype(np.float32)


class _Optimizer(Protocol):
    """The members of a `RuleOptimizer` that describe its slots."""

    rule_with_slots: UpdateRule

    @property
    def state(self) -> State: ...

    @property
    def options(self) -> Options: ...


def target_of(optimizer: _Optimizer, variable: Variable) -> tuple[Target, list[Identity], Codecs]:
    """Returns what an update of a variable writes.

    Returns:
        Its array, or its master copy's, its slots', and beside a master copy the variable itself,
        or the remainder; whose they are; and how they are stored.
    """
    stored = optimizer.options.codecs
    rule = optimizer.rule_with_slots
    names = stored.array_names(rule.slots)
    slots = {name: checked_slot(optimizer, variable, name) for name in names}
    _check_coded_blocks({name: slots[name] for name in map(scales_name, stored.coded)}, variable)
    arrays = [slot.unread_storage for slot in slots.values()]
    identities = [variable.identity, *(slot.identity for slot in slots.values())]
    first = optimizer.state.first_number(variable.identity) if optimizer.options.stages else 0
    target = Target(variable.unread_storage, arrays, first_number=first)
    codecs = codecs_of(target)
    own = zip(rule.slots, codecs.slots, strict=False)  # without those of scales
    codecs = Codecs(codecs.var, tuple(stored.coded.get(name, codec) for name, codec in own))
    if stored.masters is None or not has_master(variable.dtype):
        return target, identities, codecs
    master = checked_slot(optimizer, variable, MASTER)
    identities.append(master.identity)
    kept = paired(optimizer.state, variable, master)
    if isinstance(kept, SplitPair):
        target = target._replace(companion=kept.remainder)
        return target, identities, Codecs(stored[MASTER], codecs.slots)
    target = Target(master.unread_storage, arrays, variable.unread_storage, first)
    return target, identities, Codecs(MasterAndCopy(variable.dtype), codecs.slots)


def checked_slot(optimizer: _Optimizer, variable: Variable, slot_name: str) -> Variable:
    """Returns a slot that plans can rely on: a subclass may have made it.

    Raises:
        ValueError: it is not there, or of another shape, device or type.
    """
    rule = optimizer.rule_with_slots
    slot = optimizer.state.slot(variable, slot_name)
    if slot is None:
        raise ValueError(
            f'"{variable.name}" has no slot "{slot_name}", which the rule "{rule.name}" '
            "updates: _create_slots must make it"
        )
    codecs = optimizer.options.codecs
    if slot_name in codecs.array_names(codecs.coded):
        _check_coded_slot(codecs, slot_name, slot, variable)
        return slot
    what = f'slot "{slot_name}" of "{variable.name}"'
    expected = rule.slot_shape(slot_name, variable.shape)
    if slot.shape != expected:
        a_row = f", so it must have {expected}" if expected != variable.shape else ""
        raise ValueError(
            f"{what} has shape {slot.shape}; the variable has shape {variable.shape}{a_row}"
        )
    if slot.device != variable.device:
        raise ValueError(f"{what} is on {slot.device}; the variable is on {variable.device}")
    # The CPU converts slots of another dtype; a kernel's table has one dtype for all.
    is_master = slot_name == MASTER
    dtype = _FLOAT if is_master else codecs.form(slot_name, expected, variable.dtype).dtype
    is_fixed = variable.device.kind == "gpu" or slot_name in codecs
    if slot.dtype != dtype and is_fixed:
        whose = "the variable's, " if dtype == variable.dtype else ""
        raise ValueError(
            f"{what} has dtype {slot.dtype}; on {variable.device} it must have {whose}{dtype}"
        )
    return slot


def _check_coded_slot(
    codecs: SlotCodecs, slot_name: str, slot: Variable, variable: Variable
) -> None:
    """Raises ValueError if user code has put something else in the place of a slot's codes."""
    by_rows = slot.ndim == 2
    shape, dtype, _ = codecs.form(slot_name, variable.shape, variable.dtype, by_rows=by_rows)
    if (slot.shape, slot.dtype, slot.device) != (shape, dtype, variable.device):
        raise ValueError(
            f'slot "{slot_name}" of "{variable.name}" is in 8 bits: it must be {dtype} of shape '
            f"{shape} on {variable.device}; it is {slot.dtype} of shape {slot.shape} on "
            f"{slot.device}"
        )


def _check_coded_blocks(scales: Mapping[str, Variable], variable: Variable) -> None:
    """Raises ValueError unless the blocks of all of a variable's slots are the same.

    Args:
        scales: Of each slot in 8 bits, by the state's name for them, each for itself as it should
            be.
        variable: Whose they are.
    """
    of_scales = {name: each.shape for name, each in scales.items()}
    if len(set(of_scales.values())) > 1:
        raise ValueError(
            f'the slots of "{variable.name}" have blocks that end at rows and others that do not: '
            f"its scales are of shapes {of_scales}. Restore all slots of one state"
        )
