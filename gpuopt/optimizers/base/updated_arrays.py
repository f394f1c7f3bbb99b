"""The arrays that an update of a variable writes: its own, its slots', and a master copy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpuopt.backends import Target
from gpuopt.backends.backend import codecs_of
from gpuopt.codecs import Codecs, MasterAndCopy, Split
from gpuopt.optimizers.base.slot_bits import check_coded_blocks, check_coded_slot
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.masters import SplitPair, paired
from gpuopt.state.slot_codecs import MASTER, SlotCodecs, has_master
from gpuopt.state.state import State
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable


class _Optimizer(Protocol):
    """What a `RuleOptimizer` says of its slots."""

    rule: UpdateRule

    @property
    def state(self) -> State: ...

    @property
    def slot_codecs(self) -> SlotCodecs: ...

    def _stored_slots(self) -> Sequence[str]: ...


def target_of(optimizer: _Optimizer, variable: Variable) -> tuple[Target, list[Identity], Codecs]:
    """Returns what an update of a variable writes.

    Returns:
        Its array, or its master copy's, its slots', and beside a master copy the variable itself,
        or the remainder; whose they are; and how they are stored.
    """
    codes, masters, _ = optimizer.slot_codecs
    slots = [checked_slot(optimizer, variable, name) for name in optimizer._stored_slots()]
    arrays = [slot.unread_storage for slot in slots]
    identities = [variable.identity, *(slot.identity for slot in slots)]
    target = Target(variable.unread_storage, arrays)
    if codes is not None:
        check_coded_blocks(codes, slots, variable)
        own = codecs_of(target._replace(slots=[])).var
        return target, identities, Codecs(own, tuple(codes.codecs.values()))
    codecs = codecs_of(target)
    if masters is None or not has_master(variable.dtype):
        return target, identities, codecs
    master = checked_slot(optimizer, variable, MASTER)
    identities.append(master.identity)
    kept = paired(optimizer.state, variable, master)
    if isinstance(kept, SplitPair):
        target = target._replace(beside=kept.remainder)
        return target, identities, Codecs(Split(), codecs.slots)
    target = Target(master.unread_storage, arrays, variable.unread_storage)
    return target, identities, Codecs(MasterAndCopy(variable.dtype), codecs.slots)


def checked_slot(optimizer: _Optimizer, variable: Variable, slot_name: str) -> Variable:
    """Returns a slot that plans can rely on: a subclass may have made it.

    Raises:
        ValueError: it is not there, or of another shape, device or type.
    """
    rule = optimizer.rule
    slot = optimizer.state.slot(variable, slot_name)
    if slot is None:
        raise ValueError(
            f'"{variable.name}" has no slot "{slot_name}", which the rule "{rule.name}" '
            "updates: _create_slots must make it"
        )
    codecs = optimizer.slot_codecs
    if codecs.codes is not None:
        check_coded_slot(codecs, slot_name, slot, variable)
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
    dtype = codecs.form(slot_name, expected, variable.dtype).dtype
    is_fixed = variable.device.kind == "gpu" or slot_name == MASTER or codecs.dtype is not None
    if slot.dtype != dtype and is_fixed:
        whose = "the variable's, " if dtype == variable.dtype else ""
        raise ValueError(
            f"{what} has dtype {slot.dtype}; on {variable.device} it must have {whose}{dtype}"
        )
    return slot
