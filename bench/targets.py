"""What gpuopt is to reach, as data, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One number to reach.

    Attributes:
        workload: Where.
        quantity: What is measured. Ratios are gpuopt's time divided by that of `against`, in one
            run; the others are gpuopt's own.
        against: A contender.
        at_most: The largest that will do.
        at_least: The smallest that will do.
    """

    workload: str
    quantity: str
    against: str | None = None
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        bound = f"<= {self.at_most:g}" if self.at_least is None else f">= {self.at_least:g}"
        against = "" if self.against is None else f" against {self.against}"
        return f"{self.workload}: {self.quantity}{against} {bound}"


@dataclass(frozen=True)
class Verdict:
    """Whether a target was reached.

    Attributes:
        target: Which one.
        measured: What was measured instead of it, or None.
        met: None where there was nothing to measure.
    """

    target: Target
    measured: float | None
    met: bool | None

    def __str__(self) -> str:
        if self.met is None:
            return f"not measured  {self.target}"
        return f"{'met   ' if self.met else 'MISSED'} {self.measured:8.3f}  {self.target}"


def verdict(target: Target, measured: float | None) -> Verdict:
    """Compares a target with what was measured, or with None."""
    if measured is None:
        return Verdict(target, None, None)
    is_met = (target.at_most is None or measured <= target.at_most) and (
        target.at_least is None or measured >= target.at_least
    )
    return Verdict(target, measured, is_met)
