"""Rows that catch up with the steps that they missed, as an option of optimizers."""

from __future__ import annotations

from typing import ClassVar, Protocol

from gpuopt.rules.catch_up import CatchUpOption
from gpuopt.rules.update_rule import UpdateRule

CATCH_UP = (
    "True updates rows lazily: a row without a gradient is brought up to date when it is next read "
    'or updated, to the numbers that the steps in between would have given it. "stepping" repeats '
    "these steps one by one. Tables must be variables that own their memory."
)


class _Optimizer(Protocol):
    """What `checked_catch_up` asks for of a `RuleOptimizer`."""

    rule_of_other_rows: ClassVar[UpdateRule | None]


def checked_catch_up(given: CatchUpOption, optimizer: _Optimizer) -> CatchUpOption:
    """Returns the option.

    Raises:
        TypeError: it is none of False, True and "stepping".
        ValueError: the optimizer leaves rows without a gradient alone, or does not say what happens
            to them.
    """
    is_known = isinstance(given, bool) or (isinstance(given, str) and given == "stepping")
    if not is_known:
        raise TypeError(f'catch_up must be False, True or "stepping", got {given!r}')
    if not given:
        return given
    other_rows = optimizer.rule_of_other_rows
    if other_rows is None or other_rows.unnamed is None:
        why = (
            "leaves rows without a gradient alone: there is nothing to catch up with"
            if other_rows is None
            else f"updates other rows by {other_rows.name}, which has no `unnamed`"
        )
        raise ValueError(f"catch_up={given!r}: {type(optimizer).__name__} {why}")
    return given
