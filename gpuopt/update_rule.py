"""An update rule: the arithmetic of one optimizer step on one element."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateRule:
    """The numpy form of a rule, and where to find its CUDA twin.

    Attributes:
        apply: The numpy form. Takes flat chunks of any length and updates `var` and its slots in
            place; the gradient is read-only. What it does follows from its arguments alone: for
            large arrays it is recorded, once for the same scalars.
        slots: Slot names, in the order both forms take them.
        scalars: Per-step scalar names, in the order both forms take them.
    """

    apply: Callable[..., None]
    slots: tuple[str, ...]
    scalars: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__

    @property
    def header(self) -> str:
        """The CUDA header, named after the rule's module: variants of a rule share a file."""
        return f"rules/{self.apply.__module__.rpartition('.')[2]}.cuh"

    @property
    def functor(self) -> str:
        return "gpuopt::" + self.name.title().replace("_", "")


def update_rule(apply: Callable[..., None]) -> UpdateRule:
    """Reads a rule's contract from the signature of its numpy form.

    After `var` and `grad`, positional parameters are slots and keyword-only parameters are
    scalars.

    Raises:
        TypeError: the signature does not have this form.
    """
    parameters = list(inspect.signature(apply).parameters.values())
    if [parameter.name for parameter in parameters[:2]] != ["var", "grad"]:
        raise TypeError(f"{apply.__name__}: an update rule starts with (var, grad)")
    rest = parameters[2:]
    slots = tuple(p.name for p in rest if p.kind is p.POSITIONAL_OR_KEYWORD)
    scalars = tuple(p.name for p in rest if p.kind is p.KEYWORD_ONLY)
    if len(slots) + len(scalars) != len(rest) or any(p.default is not p.empty for p in rest):
        raise TypeError(
            f"{apply.__name__}: after (var, grad), an update rule takes slots by position and "
            "scalars by keyword, without defaults"
        )
    return UpdateRule(apply, slots, scalars)
