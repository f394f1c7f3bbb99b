"""The options by which an optimizer stores its slots, as their codecs."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from gpuopt.choices import is_one_of
from gpuopt.codecs import Codec, Coded, Plain, Split, codec_of
from gpuopt.rules.rounded import BFLOAT16
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import CODED_FORMS, MASTER, Masters, SlotCodecs, SlotDtype, SlotForm

SlotBits = Literal[8, 32]

# How many codes may share a scale.
_BLOCKS = [8, 16, 32, 64, 128, 256]
_FLOAT = np.dtype(np.float32)
_TYPES: dict[str, np.dtype[Any]] = {each.name: each for each in (BFLOAT16, _FLOAT)}
_OF_MASTERS: dict[str, Codec] = {"float32": Plain(_FLOAT), "remainder": Split()}


def slot_codecs_of(
    rule: UpdateRule,
    optimizer: str,
    *,
    slot_bits: SlotBits,
    slot_form: SlotForm,
    slot_dtype: SlotDtype | type[Any] | np.dtype[Any] | None,
    masters: Masters | type[Any] | np.dtype[Any] | None,
) -> SlotCodecs:
    """Returns the codecs of the slots that are not stored like their variable.

    Types may be given by name, or as numpy's types.

    Args:
        rule: The optimizer's.
        optimizer: The name of its class, for errors.
        slot_bits: See `RuleOptimizer`.
        slot_form: See there.
        slot_dtype: See there.
        masters: See there.

    Raises:
        ValueError: an option has an unknown value, does not fit the rule, or excludes another one.
    """
    codecs = SlotCodecs()
    if isinstance(slot_bits, bool) or not is_one_of(slot_bits, (8, 32)):
        raise ValueError(f"slot_bits must be 8 or 32, got {slot_bits!r}")
    if slot_bits == 8:
        try:
            codecs.update(coded_slots(rule, slot_form))
        except ValueError as error:
            raise ValueError(f"{optimizer}: {error}") from None
    elif slot_form != "root":
        raise ValueError(f"slot_form={slot_form!r} is for slot_bits=8, which is not given")
    if slot_dtype is not None:
        codec = codec_of(_checked_slot_dtype(slot_dtype, rule, slot_bits), _FLOAT)
        codecs.update(dict.fromkeys(rule.slots, codec))
    if masters is not None:
        codecs[MASTER] = _OF_MASTERS[_checked_masters(masters)]
        if MASTER in rule.slots:
            raise ValueError(
                f'{optimizer}: masters={masters!r} keeps master copies in a slot "{MASTER}", and '
                f"{rule.name} has a slot of this name. Rename that"
            )
    return codecs


def coded_slots(rule: UpdateRule, form: SlotForm) -> dict[str, Coded]:
    """Returns the codecs of a rule's slots in 8 bits.

    Raises:
        ValueError: the form is unknown, or has blocks that no warp of a GPU can share; there are no
            slots, or some have a number for each row: such a rule goes over each row twice.
    """
    if not is_one_of(form, CODED_FORMS):
        raise ValueError(f"slot_form must be one of {list(CODED_FORMS)}, got {form!r}")
    problem = _problem_of_slots(rule)
    if problem:
        raise ValueError(f"slot_bits=8 cannot be had {problem}. Leave it out")
    numbers, squares = CODED_FORMS[form]
    if numbers.per_block != squares.per_block or numbers.per_block not in _BLOCKS:
        raise ValueError(
            f'slot_form="{form}" has blocks of {numbers.per_block} and {squares.per_block} codes; '
            f"both must be one of {_BLOCKS}: lanes of a GPU's warp share a block, with 8 each"
        )
    return {name: squares if name in rule.squares else numbers for name in rule.slots}


def _checked_slot_dtype(given: Any, rule: UpdateRule, slot_bits: SlotBits) -> np.dtype[Any]:
    name = _name_of_dtype(given)
    if not is_one_of(name, _TYPES):
        raise ValueError(f'slot_dtype must be None, "bfloat16" or "float32", got {given!r}')
    problem = "with slot_bits=8" if slot_bits == 8 else _problem_of_slots(rule)
    if problem:
        raise ValueError(f"slot_dtype={given!r} cannot be had {problem}. Leave it out")
    return _TYPES[name]


def _problem_of_slots(rule: UpdateRule) -> str:
    """Returns why a rule's slots cannot have a codec of their own; "" if they can."""
    if not rule.slots:
        return f"of the rule {rule.name}, which has no slots"
    if rule.row_slots:
        names = ", ".join(rule.row_slots)
        return f"of the rule {rule.name}, whose slots {names} have a number for each row"
    return ""


def _checked_masters(given: Any) -> str:
    known = get_args(Masters)
    name: str = _name_of_dtype(given)
    if not is_one_of(name, known):
        raise ValueError(f"masters must be None or one of {list(known)}, got {given!r}")
    return name


def _name_of_dtype(given: Any) -> Any:
    """Returns the name of a type, as `np.float32` or `np.dtype("float32")`; all else as it is."""
    if not isinstance(given, type | np.dtype):  # np.dtype of an array would be its elements' type
        return given
    try:
        return np.dtype(given).name
    except (TypeError, ValueError):  # no type has this name
        return given
