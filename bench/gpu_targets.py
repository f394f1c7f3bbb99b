"""What gpuopt is to reach on a GPU, as data; the harness says whether it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Of what `measure` returns for a contender; see `Measured`.
Quantity = Literal["device_ratio", "wall_ratio", "wall_ms", "share_of_copy", "runs_ahead"]

# On these, and as ratios between times of one run.
GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Target:
    """One number to reach.

    Attributes:
        workload: Where.
        quantity: "device_ratio" and "wall_ratio" are gpuopt's time divided by that of `against`;
            the others are gpuopt's own.
        against: A contender.
        at_most: The largest that will do.
        at_least: The smallest that will do.
    """

    workload: str
    quantity: Quantity
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


def _targets() -> Sequence[Target]:
    few_large = [f"gpu_{job}_160m" for job in ("adam", "momentum", "adagrad")]
    sparse = ["gpu_sparse_adagrad", "gpu_sparse_lazyadam"]
    return (
        *(Target(name, "device_ratio", "torch fused", at_most=1.0) for name in few_large),
        *(Target(name, "share_of_copy", at_least=0.9) for name in few_large),
        Target("gpu_adam_gpt2", "device_ratio", "torch fused", at_most=1.03),
        Target("gpu_adam_resnet50", "wall_ratio", "torch fused", at_most=0.8),
        Target("gpu_adam_10000x64_same", "wall_ms", at_most=2.0),
        Target("gpu_adam_10000x64_fresh", "wall_ms", at_most=6.0),
        Target("gpu_adam_1000x1024_same", "wall_ms", at_most=0.2),
        Target("gpu_adam_1000x1024_fresh", "wall_ms", at_most=0.6),
        *(Target(name, "device_ratio", "torch sparse", at_most=0.2) for name in sparse),
        *(Target(name, "wall_ratio", "torch sparse", at_most=0.2) for name in sparse),
        *(Target(name, "share_of_copy", at_least=0.3) for name in sparse),
        *(Target(name, "runs_ahead", at_least=1) for name in sparse),
    )


TARGETS = _targets()


def judge(target: Target, contenders: Mapping[str, Any]) -> Verdict:
    """Compares a target with what was measured.

    Args:
        target: Of the workload that was measured.
        contenders: Names to `Measured`.
    """
    measured = _read(target, contenders)
    if measured is None:
        return Verdict(target, None, None)
    is_met = (target.at_most is None or measured <= target.at_most) and (
        target.at_least is None or measured >= target.at_least
    )
    return Verdict(target, measured, is_met)


def _read(target: Target, contenders: Mapping[str, Any]) -> float | None:
    found = contenders.get(target.against or "gpuopt")
    if found is None:
        return None
    match target.quantity:
        case "device_ratio":
            value = found.device.ratio
        case "wall_ratio":
            value = found.wall.ratio
        case "wall_ms":
            value = found.wall.median_ms
        case "share_of_copy":
            value = found.device.share_of_copy
        case "runs_ahead":
            value = found.runs_ahead
    return None if value is None else float(value)
