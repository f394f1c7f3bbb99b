"""Lists every kernel that is ever compiled."""

from __future__ import annotations

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.update_rule import UpdateRule

DTYPES = ["float16", "bfloat16", "float32", "float64"]
INDICES = ["int32", "int64"]
KEYS = ["uint32", "uint64"]


def kernels_of(rule: UpdateRule) -> list[Kernel]:
    return [
        kernel
        for dtype in DTYPES
        for kernel in (
            kernels.dense_update(rule, dtype),
            kernels.update_other_rows(rule, dtype),
            *(kernels.sparse_update(rule, dtype, key) for key in KEYS),
        )
    ]


def kernels_without_rule() -> list[Kernel]:
    return [
        *(kernels.check_rows(index) for index in INDICES),
        *(kernels.count_digits(source) for source in (*INDICES, *KEYS)),
        *(kernels.move_rows(index, key) for index in INDICES for key in KEYS),
        *(kernels.move_rows(key, key) for key in KEYS),
        *(make(key) for make in (kernels.count_runs, kernels.write_runs) for key in KEYS),
        *(make(dtype) for make in (kernels.sum_pieces, kernels.sum_runs) for dtype in DTYPES),
    ]
