"""The targets for gpuopt's speed on a GPU.

A target names a workload, a number of it, and what that is divided by: the time of another
contender in the same run, or a copy's bandwidth just before it. Times alone are for `GPU`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.targets import Target, Verdict, compare

GPU = "NVIDIA H200"
# A copy of 2 GiB within the GPU's memory, which reads and writes as many bytes.
COPY = "a copy's"


def _list_targets() -> Sequence[Target]:
    few_large = [f"gpu_{job}_160m" for job in ("adam", "momentum", "adagrad")]
    sparse = ["gpu_sparse_adagrad", "gpu_sparse_lazyadam"]
    ten_tables = "gpu_sparse_lazyadam_10_tables"
    return (
        *(Target(name, "device_ratio", "torch fused", at_most=1.0) for name in few_large),
        *(Target(name, "bandwidth_ratio", COPY, at_least=0.9) for name in few_large),
        Target("gpu_adam_gpt2", "device_ratio", "torch fused", at_most=1.03),
        Target("gpu_adam_resnet50", "wall_ratio", "torch fused", at_most=0.8),
        Target("gpu_adam_10000x64_same", "wall_ms", at_most=2.0),
        Target("gpu_adam_10000x64_fresh", "wall_ms", at_most=6.0),
        Target("gpu_adam_1000x1024_same", "wall_ms", at_most=0.2),
        Target("gpu_adam_1000x1024_fresh", "wall_ms", at_most=0.6),
        *(Target(name, "device_ratio", "torch sparse", at_most=0.2) for name in sparse),
        *(Target(name, "wall_ratio", "torch sparse", at_most=0.2) for name in sparse),
        *(Target(name, "bandwidth_ratio", COPY, at_least=0.3) for name in sparse),
        # FBGEMM's backward pass and its Adam of such tables took 1.005 ms on an H100: 48% of what
        # its memory can move (recsys-examples, dynamicemb/benchmark/benchmark_results.json). Here
        # the backward pass has been made: the gradient's rows are given.
        Target(ten_tables, "bandwidth_ratio", COPY, at_least=0.5),
        *(Target(name, "runs_ahead", at_least=1) for name in (*sparse, ten_tables)),
    )


TARGETS = _list_targets()


def judge(target: Target, contenders: Mapping[str, Any]) -> Verdict:
    """Compares a target with the measurements.

    Args:
        target: A target of this workload. Its quantity is "device_ratio", "wall_ratio", "wall_ms",
            "bandwidth_ratio" or "runs_ahead".
        contenders: Each contender's `Measured`, by name.
    """
    return compare(target, _read(target, contenders))


def _read(target: Target, contenders: Mapping[str, Any]) -> float | None:
    against = None if target.against == COPY else target.against
    found = contenders.get(against or "gpuopt")
    if found is None:
        return None
    match target.quantity:
        case "device_ratio":
            value = found.device.ratio
        case "wall_ratio":
            value = found.wall.ratio
        case "wall_ms":
            value = found.wall.median_ms
        case "bandwidth_ratio":
            value = found.device.share_of_copy
        case "runs_ahead":
            value = found.runs_ahead
        case _:
            raise ValueError(f"nothing measures {target.quantity}: {target}")
    return None if value is None else float(value)
