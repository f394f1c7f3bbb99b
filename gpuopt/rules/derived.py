"""Rules that are made of another rule, in both of its forms."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuopt.rules.update_rule import UpdateRule


@dataclass(frozen=True, eq=False)
class DerivedRule(UpdateRule):
    """A rule that does more, or less, than another rule.

    Attributes:
        base: The other rule.
        header: Has the functor that is made of the other rule's.
    """

    base: UpdateRule = field(kw_only=True)
    header: str = field(kw_only=True)

    @property
    def headers(self) -> tuple[str, ...]:
        return (*self.base.headers, self.header)
