"""What gpuopt is to reach on a CPU, as data; the harness says whether it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.harness import Timing
from bench.targets import Target, Verdict, verdict

# How much longer than torch a large dense step may take, with numpy alone.
_NUMPY_ALONE = {"momentum": 1.3, "adagrad": 1.8, "adam": 2.2}
_COMPILED = 1.05


def _targets() -> Sequence[Target]:
    large = ("16m", "resnet50")
    jobs = [f"{job}_{size}" for job in _NUMPY_ALONE for size in large]
    numpy_alone = [
        *((job, "torch fused", _NUMPY_ALONE[job.partition("_")[0]]) for job in jobs),
        *((f"rms_prop_{size}", "torch foreach", 0.5) for size in large),
        ("adam_1000x64", "torch fused", 0.2),
        ("momentum_1000x64", "torch fused", 0.35),
        ("sparse_lazy_adam", "torch sparse_adam", 0.8),
        ("sparse_adagrad", "torch sparse_adagrad", 0.9),
        ("all_rows_adam", "torch to_dense, fused", 1.2),
    ]
    compiled = [
        *((job, "torch fused", _COMPILED) for job in jobs),
        ("sparse_lazy_adam", "torch sparse_adam", 0.5),
        ("sparse_adagrad", "torch sparse_adam", 0.5),
        ("row_sums", "torch coalesce", 1.0),
    ]
    return (
        *(Target(f"host_{job}", "numpy_ratio", peer, limit) for job, peer, limit in numpy_alone),
        *(Target(f"host_{job}", "ratio", peer, limit) for job, peer, limit in compiled),
    )


TARGETS = _targets()


def judge(target: Target, contenders: Mapping[str, Timing]) -> Verdict:
    """Compares a target with what was measured.

    Args:
        target: Of the workload that was measured. Its quantity is "ratio", or "numpy_ratio" for
            gpuopt where nothing was compiled.
        contenders: By name.
    """
    found = contenders.get(target.against or "gpuopt")
    return verdict(target, None if found is None else getattr(found, target.quantity))
