"""Rules that are made of another rule, in both of its forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.update_rule import UpdateRule

Derived = TypeVar("Derived", bound="DerivedRule")


@dataclass(frozen=True, eq=False)
class DerivedRule(UpdateRule):
    """A rule that does more, or less, than another rule.

    Attributes:
        base: The other rule.
        template: Of the functor that is made of the other rule's.
        header: Has this template.
    """

    base: UpdateRule = field(kw_only=True)
    template: str = field(kw_only=True)
    header: str = field(kw_only=True)

    @computed_once
    def is_emitted(self) -> bool:
        return False

    @property
    def functor(self) -> str:
        return f"{self.template}<{self.base.functor}>"

    @property
    def definitions(self) -> tuple[str, ...]:
        return (*self.base.definitions, f'#include "{self.header}"')

    @property
    def include_folders(self) -> tuple[Traversable, ...]:
        return self.base.include_folders

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.base.fields, *self.scalars[len(self.base.scalars) :])


def derive(
    kind: type[Derived],
    base: UpdateRule,
    apply: Callable[..., None],
    terms: Callable[..., Sequence[Any]],
    *,
    header: str,
    slots: tuple[str, ...] = (),
    scalars: tuple[str, ...] = (),
    sums: tuple[str, ...] = (),
    is_rounded: bool = False,
    is_averaged: bool = False,
    stored: np.dtype[Any] | None = None,
) -> Derived:
    """Returns a rule with more slots before those of `base`, and more scalars behind its own.

    Args:
        kind: The rule's class.
        base: The rule that it is made of.
        apply: Its function, named as its functor: `decayed_rows` for `DecayedRows`.
        terms: What it sums, if it has sums.
        header: Has its functor, which is made of that of `base`.
        slots: The slots that it has besides.
        scalars: What it takes besides.
        sums: Those of `scalars` that are sums, in the place of the sums of `base`.
        is_rounded: Whether backends round what it writes stochastically, if they do not for `base`.
        is_averaged: Whether it moves an average of the variable, if `base` does not.
        stored: See `UpdateRule`; that of `base` if there is none.
    """
    name = apply.__name__
    apply.__name__ = f"{name}_{base.name}"
    apply.__module__ = base.apply.__module__
    all_sums = sums or base.sums
    return kind(
        apply,
        (*slots, *base.slots),
        (*base.scalars, *scalars),
        None,
        base.squares,
        all_sums,
        terms if all_sums else None,
        base.row_slots,
        eight_bit=base.eight_bit,
        degrees=() if sums else base.degrees,
        is_rounded=is_rounded or base.is_rounded,
        is_averaged=is_averaged or base.is_averaged,
        stored=stored or base.stored,
        base=base,
        template=f"gpuopt::{name.title().replace('_', '')}",
        header=header,
    )
