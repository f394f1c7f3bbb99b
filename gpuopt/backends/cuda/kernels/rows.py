"""Kernels that check, sort, sum and copy rows, whatever the rule."""

from __future__ import annotations

from functools import cache

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.kernels.common import (
    INT32,
    INT64,
    OF_SPARSE_UPDATE,
    REFUSED,
    TABLES,
    UINT32S,
)
from gpuopt.backends.cuda.launch_shapes import (
    COPY_CHUNK,
    COPY_THREADS,
    DIGIT_BITS,
    FEW_ROWS,
    NUM_DIGITS,
    SHARES_PER_GROUP,
    SORT_THREADS,
    SORT_TILE,
)
from gpuopt.backends.cuda.mixed import real_of
from gpuopt.backends.cuda.parameters import CPP_TYPES, Pointer, struct_of
from gpuopt.backends.cuda.structs import CopiedRows, IndexList, Shares, SortedRows

_SHARES = struct_of(Shares)
_OF_SORT_ROWS = {
    "gpuopt::sort_threads": SORT_THREADS,
    "gpuopt::tile_size": SORT_TILE,
    "gpuopt::shares_per_group": SHARES_PER_GROUP,
    "gpuopt::digit_bits": DIGIT_BITS,
    "gpuopt::num_digits": NUM_DIGITS,
}


@cache
def check_rows() -> Kernel:
    return Kernel(
        "check_rows",
        {
            "only": struct_of(IndexList),
            "lists": Pointer("int64", struct_of(IndexList), is_optional=True),
            "num_lists": INT64,
            "num_rows": INT64,
            "refused": REFUSED,
        },
    )


@cache
def gather_rows() -> Kernel:
    return Kernel(
        "gather_rows",
        {
            "lists": Pointer("int64", struct_of(IndexList)),
            "num_lists": INT64,
            "num_rows": INT64,
            "keys": Pointer("int32"),
            "refused": REFUSED,
        },
        file="check_rows.cu",
    )


@cache
def count_digits(key: str) -> Kernel:
    return Kernel(
        "count_digits",
        {
            "keys": Pointer(key),
            "shares": _SHARES,
            "shift": INT32,
            "counts": UINT32S,
            "group_counts": UINT32S,
            "next_group_counts": UINT32S,
            "refused": REFUSED,
        },
        {"Key": CPP_TYPES[key]},
        file="sort_rows.cu",
        constants=_OF_SORT_ROWS,
    )


@cache
def check_and_count_digits(index: str) -> Kernel:
    return Kernel(
        "check_and_count_digits",
        {
            "keys": Pointer(index),
            "shares": _SHARES,
            "height": INT64,
            "variable": INT64,
            "counts": UINT32S,
            "group_counts": UINT32S,
            "next_group_counts": UINT32S,
            "refused": REFUSED,
        },
        {"Key": CPP_TYPES[index]},
        file="sort_rows.cu",
        constants=_OF_SORT_ROWS,
    )


@cache
def move_rows(source: str, key: str) -> Kernel:
    return Kernel(
        "move_rows",
        {
            "keys": Pointer(source),
            "positions": UINT32S,
            "shares": _SHARES,
            "shift": INT32,
            "counts": UINT32S,
            "group_counts": UINT32S,
            "sorted_keys": Pointer(key),
            "sorted_positions": UINT32S,
            "refused": REFUSED,
        },
        {"Source": CPP_TYPES[source], "Key": CPP_TYPES[key]},
        file="sort_rows.cu",
        constants=_OF_SORT_ROWS,
    )


@cache
def sort_few_rows(source: str, key: str) -> Kernel:
    return Kernel(
        "sort_few_rows",
        {
            "source": Pointer(source),
            "num_rows": INT64,
            "key_bits": INT32,
            "sorted_keys": Pointer(key),
            "sorted_positions": UINT32S,
            "refused": REFUSED,
        },
        {"Source": CPP_TYPES[source], "Key": CPP_TYPES[key]},
        constants={**_OF_SORT_ROWS, "gpuopt::few_rows": FEW_ROWS},
    )


@cache
def sum_pieces(dtype: str, key: str) -> Kernel:
    return Kernel(
        "sum_pieces",
        {
            **TABLES,
            "rows": struct_of(SortedRows, Key=key),
            "row_width": INT64,
            "parts": Pointer(real_of(dtype)),
            "lanes_per_row": INT32,
            "refused": REFUSED,
        },
        {"Storage": CPP_TYPES[dtype], "Key": CPP_TYPES[key]},
        file="sparse_update.cu",
        constants=OF_SPARSE_UPDATE,
    )


@cache
def sum_runs(dtype: str, key: str) -> Kernel:
    return Kernel(
        "sum_runs",
        {
            "grad": Pointer(dtype),
            "rows": struct_of(SortedRows, Key=key),
            "begins": Pointer("int64"),
            "num_runs": INT64,
            "parts": Pointer(real_of(dtype)),
            "row_width": INT64,
            "sums": Pointer(real_of(dtype)),
            "lanes_per_row": INT32,
        },
        {"Storage": CPP_TYPES[dtype], "Key": CPP_TYPES[key]},
        file="sparse_update.cu",
        constants=OF_SPARSE_UPDATE,
    )


@cache
def mark_rows(key: str) -> Kernel:
    return Kernel(
        "mark_rows",
        {
            "rows": struct_of(SortedRows, Key=key),
            "touched": UINT32S,
            "refused": REFUSED,
        },
        {"Key": CPP_TYPES[key]},
        file="sparse_update.cu",
        constants=OF_SPARSE_UPDATE,
    )


@cache
def copy_rows() -> Kernel:
    return Kernel(
        "copy_rows",
        {
            "arrays": Pointer("int64", struct_of(CopiedRows)),
            "num_arrays": INT64,
            "num_chunks": INT64,
        },
        constants={"gpuopt::copy_threads": COPY_THREADS, "gpuopt::copy_chunk": COPY_CHUNK},
    )
