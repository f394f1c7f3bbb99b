"""The targets for gpuopt's speed on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench import averages, catch_up, clipping, mixed_precision, rows, slot_bits, step_path
from bench.harness import Timing
from bench.targets import Target, Verdict, compare

# The largest ratio of row-wise Adagrad's time to Adagrad's: a vector's rows are its elements, and a
# narrow table's are summed one by one.
_ROW_WISE = {"vector": 1.3, "5_columns": 2.0, "64_columns": 1.3, "400x40x5": 2.0}
# The largest ratio to torch's time for a large dense step, without compiled rules.
_NUMPY_ALONE = {"momentum": 1.3, "adagrad": 1.8, "adam": 2.2}
_COMPILED = 1.05


def _list_targets() -> Sequence[Target]:
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
        ("groups", "one group, numpy alone", 1.05),
        *((f"row_wise_{name}", "Adagrad, numpy alone", limit) for name, limit in _ROW_WISE.items()),
    ]
    compiled = [
        *((job, "torch fused", _COMPILED) for job in jobs),
        *((f"adam_w_{size}", "torch fused", 1.1) for size in large),
        ("sparse_lazy_adam", "torch sparse_adam", 0.5),
        ("sparse_adagrad", "torch sparse_adam", 0.5),
        ("row_sums", "torch coalesce", 1.0),
        ("groups", "one group", 1.05),
        *((f"row_wise_{name}", "Adagrad", limit) for name, limit in _ROW_WISE.items()),
    ]
    return (
        *(Target(f"host_{job}", "numpy_ratio", peer, limit) for job, peer, limit in numpy_alone),
        *(Target(f"host_{job}", "ratio", peer, limit) for job, peer, limit in compiled),
    )


TARGETS = (
    *_list_targets(),
    *step_path.TARGETS,
    *rows.TARGETS,
    *catch_up.TARGETS,
    *averages.TARGETS,
    *clipping.TARGETS,
    *slot_bits.TARGETS,
    *mixed_precision.TARGETS,
)


def judge(target: Target, contenders: Mapping[str, Timing]) -> Verdict:
    """Compares a target with the measurements.

    Args:
        target: A target of this workload. Its quantity is "ratio", or "numpy_ratio" for gpuopt
            without compiled rules.
        contenders: Each contender's timing, by name.
    """
    found = contenders.get(target.against or "gpuopt")
    return compare(target, None if found is None else getattr(found, target.quantity))
