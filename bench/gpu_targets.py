"""The targets for gpuopt's speed on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.targets import Target, Verdict, compare

# The targets are for this GPU. Ratios are between times of one run.
GPU = "NVIDIA H200"


def _list_targets() -> Sequence[Target]:
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


TARGETS = _list_targets()


def judge(target: Target, contenders: Mapping[str, Any]) -> Verdict:
    """Compares a target with the measurements.

    Args:
        target: A target of this workload. Its quantity is "device_ratio", "wall_ratio", "wall_ms",
            "share_of_copy" or "runs_ahead".
        contenders: Each contender's `Measured`, by name.
    """
    return compare(target, _read(target, contenders))


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
        case _:
            raise ValueError(f"nothing measures {target.quantity}: {target}")
    return None if value is None else float(value)
