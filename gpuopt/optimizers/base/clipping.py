"""Clipping of gradients as options of every optimizer, and of its groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from gpuopt.choices import is_one_of
from gpuopt.optimizers.base.arguments import ClipFormName
from gpuopt.optimizers.base.declared import Hyperparameter
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.step.clips import (
    CLIP_NORM,
    CLIP_VALUE,
    NO_LIMIT,
    checked_most,
    refuse_both,
)
from gpuopt.variables.scalars import as_scalar

CLIPPING = (CLIP_NORM, CLIP_VALUE)


def has_clipping(
    given: Mapping[str, Any], clip_form: ClipFormName, groups: Iterable[ParameterGroup]
) -> bool:
    """Checks the options of clipping; returns whether gradients are to be clipped.

    Args:
        given: The largest norm and element; None if there is none.
        clip_form: The formula of norms.
        groups: Groups that may have their own.

    Raises:
        TypeError: a number is none.
        ValueError: one is below 0 or NaN, both would clip, or the formula is unknown, or there is
            no norm that it could be for.
    """
    if not is_one_of(clip_form, get_args(ClipFormName)):
        raise ValueError(
            f"clip_form must be one of {list(get_args(ClipFormName))}, got {clip_form!r}"
        )
    named = {name for name, value in given.items() if value is not None}
    # A group may name one with None.
    named |= {name for group in groups for name in CLIPPING if name in group.hyperparameters}
    if clip_form != "tensorflow" and CLIP_NORM not in named:
        raise ValueError(f'clip_form="{clip_form}" is a formula for clip_norm, which is not given')
    _refuse_two(given, "")
    for group in groups:
        _refuse_two(group.hyperparameters, f'group "{group.name}": ')
    return bool(named)


def checked_clipping(name: str, value: Hyperparameter | None) -> Hyperparameter:
    """Returns the largest norm or element as it is kept: infinite for None.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 0, or NaN. What a function returns is not known yet.
    """
    if value is None:
        return NO_LIMIT
    if not callable(value):
        checked_most(name, as_scalar(value, name))
    return value


def _refuse_two(given: Mapping[str, Any], whose: str) -> None:
    """Raises ValueError if two numbers would both clip; functions are not called."""
    if not [name for name in CLIPPING if given.get(name) is None or callable(given[name])]:
        refuse_both(whose, *(checked_most(name, as_scalar(given[name], name)) for name in CLIPPING))
