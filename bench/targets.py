"""Targets for gpuopt's speed, and whether a measurement met them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from gpuopt.bench.peers import NUMPY_ALONE
from gpuopt.bench.results import Run


@dataclass(frozen=True)
class Target:
    """A bound for one measured number.

    Attributes:
        workload: The workload's name.
        quantity: What is measured, behind the kind of times unless that is "step", as in
            "wall.ratio". "ratio" is the median, over all rounds, of gpuopt's time divided by that
            of `against`, and "extra_ms" that of the difference. "numpy_ratio" is as "ratio", for
            gpuopt without compiled rules. Other numbers are gpuopt's own: "median_ms", and what
            `Figures` has.
        against: A contender; None for gpuopt's own numbers.
        at_most: The largest number that meets the target, or None.
        at_least: The smallest number that meets the target, or None.
    """

    workload: str
    quantity: str
    against: str | None = None
    at_most: float | None = None
    at_least: float | None = None

    def is_met_by(self, measured: float) -> bool:
        return (self.at_most is None or measured <= self.at_most) and (
            self.at_least is None or measured >= self.at_least
        )

    @property
    def subject(self) -> str:
        against = "" if self.against is None else f" against {self.against}"
        return f"{self.workload}: {self.quantity}{against}"

    def __str__(self) -> str:
        bound = f"<= {self.at_most:g}" if self.at_least is None else f">= {self.at_least:g}"
        return f"{self.subject} {bound}"


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


def find_measured(target: Target, run: Run) -> float | None:
    """Returns the number that a target bounds; None where it was not measured."""
    kind, _, quantity = target.quantity.rpartition(".")
    kind = kind or "step"
    mine, against = (NUMPY_ALONE if quantity == "numpy_ratio" else "gpuopt"), target.against
    if mine not in run.contenders or (against or mine) not in run.contenders:
        return None
    ours = run.contenders[mine]
    if quantity == "median_ms":
        return ours.times[kind].median_ms
    if against is None:
        number = getattr(ours, quantity)
        return None if number is None else float(number)
    if quantity == "extra_ms":
        return median(our_ms - its_ms for our_ms, its_ms in _list_rounds(run, mine, against, kind))
    return find_ratio(run, against, mine, kind)


def find_ratio(run: Run, against: str, mine: str = "gpuopt", kind: str = "step") -> float:
    """Returns the median, over all rounds, of a contender's time divided by that of `against`."""
    return median(my_ms / its_ms for my_ms, its_ms in _list_rounds(run, mine, against, kind))


def _list_rounds(run: Run, mine: str, against: str, kind: str) -> Iterator[tuple[float, float]]:
    samples = (run.contenders[who].times[kind].samples_ms for who in (mine, against))
    return zip(*samples, strict=True)


def is_missed(target: Target, run: Run) -> bool:
    """Whether what was measured is beyond a target's bound."""
    measured = find_measured(target, run)
    return measured is not None and not target.is_met_by(measured)


def judge(target: Target, run: Run) -> str:
    """Returns a line that tells whether a target was met."""
    measured = find_measured(target, run)
    if measured is None:
        return f"not measured  {target}"
    return f"{'MISSED' if is_missed(target, run) else 'met   '} {measured:8.3f}  {target}"
