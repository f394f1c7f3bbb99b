"""Every kernel with its parameters, by the types that it is compiled for."""

from __future__ import annotations

from functools import cache

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.update_rule import UpdateRule

# numpy dtype names to C++ types.
CPP_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}


@cache
def dense_update(rule: UpdateRule, dtype: str) -> Kernel:
    return Kernel(
        "dense_update",
        ("*int64", "int64", "*uint32", "int64", "int64", _real(dtype), "*uint64"),
        (rule.functor, CPP_TYPES[dtype]),
        rule.header,
    )


@cache
def check_rows(index: str) -> Kernel:
    parameters = (f"*{index}", "int64", "int64", "int64", "*uint64")
    return Kernel("check_rows", parameters, (CPP_TYPES[index],), file="sort_rows.cu")


@cache
def count_digits(key: str) -> Kernel:
    parameters = (f"*{key}", "int64", "int32", "*uint32", "int64", "int64", "*uint64")
    return Kernel("count_digits", parameters, (CPP_TYPES[key],), file="sort_rows.cu")


@cache
def move_rows(source: str, key: str) -> Kernel:
    shares = ("*uint32", "int64", "int64")
    inputs = (f"*{source}", "*uint32", "int64", "int32", *shares)
    types = CPP_TYPES[source], CPP_TYPES[key]
    parameters = (*inputs, f"*{key}", "*uint32", "*uint64")
    return Kernel("move_rows", parameters, types, file="sort_rows.cu")


@cache
def count_runs(key: str) -> Kernel:
    parameters = (f"*{key}", "int64", "*uint32", "int64", "int64", "*uint64")
    return Kernel("count_runs", parameters, (CPP_TYPES[key],), file="find_runs.cu")


@cache
def write_runs(key: str) -> Kernel:
    shares = ("*uint32", "int64", "int64")
    outputs = ("*uint32", "*uint32", "*uint32", "*uint32", "int32")
    parameters = (f"*{key}", "int64", *shares, *outputs, "*uint64")
    return Kernel("write_runs", parameters, (CPP_TYPES[key],), file="find_runs.cu")


@cache
def sum_pieces(dtype: str) -> Kernel:
    runs = ("*uint32", "*uint32")
    parameters = (f"*{dtype}", "*uint32", "int64", "int64", *runs, _real(dtype), "int32", "*uint64")
    return Kernel("sum_pieces", parameters, (CPP_TYPES[dtype],), file="sparse_update.cu")


@cache
def sum_runs(dtype: str) -> Kernel:
    runs = ("*uint32", "*uint32", "*uint32")
    sums = (_real(dtype), "int64", _real(dtype), "int32")
    parameters = (f"*{dtype}", *runs, *sums, "*uint64")
    return Kernel("sum_runs", parameters, (CPP_TYPES[dtype],), file="sparse_update.cu")


@cache
def sparse_update(rule: UpdateRule, dtype: str, key: str) -> Kernel:
    rows = (f"*{key}", "*uint32", "*uint32", "*uint32")
    marks = ("*uint32", "int32", "int32")
    return Kernel(
        "sparse_update",
        ("*int64", f"*{dtype}", *rows, _real(dtype), "int64", _real(dtype), *marks, "*uint64"),
        (rule.functor, CPP_TYPES[dtype], CPP_TYPES[key]),
        rule.header,
    )


@cache
def update_other_rows(rule: UpdateRule, dtype: str) -> Kernel:
    return Kernel(
        "update_other_rows",
        ("*int64", "int64", "int64", _real(dtype), "*uint32", "*uint64"),
        (rule.functor, CPP_TYPES[dtype]),
        rule.header,
        file="sparse_update.cu",
    )


def _real(dtype: str) -> str:
    """A pointer to what a rule computes in for storage of `dtype`."""
    return "*float64" if dtype == "float64" else "*float32"
