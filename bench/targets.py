"""Targets for gpuopt's speed, and whether a measurement met them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Target:
    """A bound for one measured number.

    Attributes:
        workload: The workload's name.
        quantity: The name of the measured number. A ratio is gpuopt's number divided by that of
            `against` in the same run; other numbers are gpuopt's own.
        against: A contender; None for numbers that are no ratios.
        at_most: The largest number that meets the target, or None.
        at_least: The smallest number that meets the target, or None.
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
    """Whether a target was met.

    Attributes:
        target: The target.
        measured: The measured number; None if nothing was measured.
        met: Whether `measured` is within the bound; None if nothing was measured.
    """

    target: Target
    measured: float | None
    met: bool | None

    def __str__(self) -> str:
        if self.met is None:
            return f"not measured  {self.target}"
        return f"{'met   ' if self.met else 'MISSED'} {self.measured:8.3f}  {self.target}"


def compare(target: Target, measured: float | None) -> Verdict:
    """Compares a target with the measured number; None stands for no measurement."""
    if measured is None:
        return Verdict(target, None, None)
    is_met = (target.at_most is None or measured <= target.at_most) and (
        target.at_least is None or measured >= target.at_least
    )
    return Verdict(target, measured, is_met)


def list_targets(
    workload: str, ratios: Mapping[str, float], numpy_ratios: Mapping[str, float] | None = None
) -> list[Target]:
    """Returns targets for ratios.

    Args:
        workload: Its name.
        ratios: The largest ratios of gpuopt's time to that of a contender.
        numpy_ratios: The same of gpuopt without compiled rules.
    """
    without = (numpy_ratios or {}).items()
    return [
        *(Target(workload, "numpy_ratio", peer, at_most=limit) for peer, limit in without),
        *(Target(workload, "ratio", peer, at_most=limit) for peer, limit in ratios.items()),
    ]


def judge(target: Target, contenders: Mapping[str, Any]) -> Verdict:
    """Compares a target with measurements.

    Args:
        target: A target of this workload. Its quantity is an attribute of what was measured of
            `against`, or else of gpuopt, as in "device.ratio".
        contenders: What was measured of each contender, by name.
    """
    found = contenders.get(target.against or "gpuopt")
    measured = None if found is None else attrgetter(target.quantity)(found)
    return compare(target, None if measured is None else float(measured))
