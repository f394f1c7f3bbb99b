"""Kernels that measure and scale gradients, and decide about steps."""

from __future__ import annotations

from functools import cache

from gpuopt.backends.clips import ClipForm
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.kernels.common import INT32, INT64, REFUSED, TABLES, UINT32S
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK, CLIP_THREADS, MEASURED_ROWS, WARP
from gpuopt.backends.cuda.mixed import Storage, cpp_types, real_of
from gpuopt.backends.cuda.parameters import CPP_TYPES, Number, Parameter, Pointer, Struct, struct_of
from gpuopt.backends.cuda.structs import (
    NOTHING_IS_WRONG,
    ClippedArray,
    ClipResult,
    ClipRule,
    ClipTotals,
    FewSums,
    LossDecision,
    MeasuredVariable,
    SortedRows,
)
from gpuopt.backends.norms import Clipping
from gpuopt.rules.update_rule import UpdateRule

_CLIPPED: dict[str, Number | Pointer | Struct] = {
    "only": struct_of(ClippedArray),
    "arrays": Pointer("int64", struct_of(ClippedArray), is_optional=True),
    "num_arrays": INT64,
    "num_chunks": INT64,
}
_SUMMED: dict[str, Parameter] = {
    "parts": Pointer("float64"),
    "totals": struct_of(ClipTotals),
    "rule": struct_of(ClipRule),
    "results": Pointer("float64", struct_of(ClipResult), is_optional=True),
}
_DECIDING: dict[str, Parameter] = {**_SUMMED, "decision": struct_of(LossDecision)}
_OF_FACTORS = {
    "gpuopt::clip_tensorflow": ClipForm.TENSORFLOW,
    "gpuopt::clip_torch": ClipForm.TORCH,
    "gpuopt::clip_apex": ClipForm.APEX,
}
_OF_DECISION = {"gpuopt::nothing_is_wrong": NOTHING_IS_WRONG}
_OF_MEASURE_ROWS = {
    "gpuopt::clip_threads": CLIP_THREADS,
    "gpuopt::measured_rows": MEASURED_ROWS,
    "gpuopt::warp_size": WARP,
    **_OF_FACTORS,
}
_OF_CHUNKS = {
    **_OF_FACTORS,
    "gpuopt::clip_threads": CLIP_THREADS,
    "gpuopt::clip_chunk": CLIP_CHUNK,
}
_OF_CLIP = {
    **_OF_CHUNKS,
    "gpuopt::clip_global_norm": Clipping.GLOBAL_NORM,
    "gpuopt::clip_norm_of_one": Clipping.NORM,
    "gpuopt::clip_average_norm": Clipping.AVERAGE_NORM,
}


@cache
def sum_squares(dtype: str) -> Kernel:
    return Kernel(
        "sum_squares",
        {**_CLIPPED, "sums": Pointer("float64")},
        {"Storage": CPP_TYPES[dtype]},
        file="clip.cu",
        constants=_OF_CLIP,
    )


@cache
def add_squares(real: str) -> Kernel:
    return Kernel(
        "add_squares",
        {
            "sums": Pointer("float64"),
            "num_sums": INT64,
            "is_root": INT32,
            "result": Pointer(real),
        },
        {"Real": CPP_TYPES[real]},
        file="clip.cu",
        constants=_OF_CLIP,
    )


@cache
def scale_to_norm(dtype: str) -> Kernel:
    real = real_of(dtype)
    return Kernel(
        "scale_to_norm",
        {**_CLIPPED, "norm": Pointer(real), "most": Number(real), "formula": INT32},
        {"Storage": CPP_TYPES[dtype]},
        file="clip.cu",
        constants=_OF_CLIP,
    )


@cache
def measure(dtype: str, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_and_decide" if decides else "measure",
        {**_CLIPPED, **(_DECIDING if decides else _SUMMED)},
        {"Storage": CPP_TYPES[dtype]},
        file="clip.cu",
        constants={**_OF_CLIP, **_OF_DECISION} if decides else _OF_CLIP,
    )


@cache
def measure_inputs(rule: UpdateRule, storage: Storage, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_inputs_and_decide" if decides else "measure_inputs",
        {
            **_CLIPPED,
            "variables": Pointer("int64", struct_of(MeasuredVariable)),
            "parts_of_sums": Pointer("float64"),
            "num_done": UINT32S,
            "sums": Pointer("float64"),
            **(_DECIDING if decides else _SUMMED),
        },
        cpp_types(storage),
        rule,
        file="measure_inputs.cu",
        constants={**_OF_CHUNKS, **_OF_DECISION} if decides else _OF_CHUNKS,
    )


@cache
def measure_rows(dtype: str, key: str, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_rows_and_decide" if decides else "measure_rows",
        {
            **TABLES,
            "rows": struct_of(SortedRows, Key=key),
            "run_parts": Pointer(real_of(dtype)),
            "row_width": INT64,
            "lanes_per_row": INT32,
            "refused": REFUSED,
            **(_DECIDING if decides else _SUMMED),
        },
        {"Storage": CPP_TYPES[dtype], "Key": CPP_TYPES[key]},
        file="measure_rows.cu",
        constants={**_OF_MEASURE_ROWS, **_OF_DECISION} if decides else _OF_MEASURE_ROWS,
    )


@cache
def join_sums(decides: bool = False) -> Kernel:
    return Kernel(
        "join_and_decide" if decides else "join_sums",
        {
            "few_sums": struct_of(FewSums),
            "many_sums": Pointer("int64", is_optional=True),
            "num_devices": INT64,
            "num_norms": INT64,
            "rule": struct_of(ClipRule),
            "results": Pointer("float64", struct_of(ClipResult)),
            **({"decision": struct_of(LossDecision)} if decides else {}),
        },
        {"Decision": struct_of(LossDecision).cpp_type} if decides else {},
        file="clip.cu",
        constants={**_OF_CLIP, **_OF_DECISION} if decides else _OF_CLIP,
    )
