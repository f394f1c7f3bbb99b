"""Every kernel with its parameters, by the types that it is compiled for."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.mixed import Storage, cpp_types, num_companions, real_of
from gpuopt.backends.cuda.parameters import CPP_TYPES, Number, Parameter, Pointer, Struct, struct_of
from gpuopt.backends.cuda.structs import (
    FEW_GROUPS,
    FEW_GROUPS_BYTES,
    Arrays,
    Chunk,
    ClippedArray,
    ClippedScalars,
    ClipResult,
    ClipRule,
    ClipTotals,
    CodedVariable,
    CopiedRows,
    FewGradients,
    FewScalars,
    FewSums,
    IndexList,
    LateTable,
    LossDecision,
    MeasuredVariable,
    NoDecision,
    ScaledScalars,
    Shares,
    SortedRows,
    TableGradient,
    Variable,
)
from gpuopt.codecs import Coded
from gpuopt.rules.rounded import ROUNDING
from gpuopt.rules.shift import cpp_type
from gpuopt.rules.update_rule import UpdateRule

INT32 = Number("int32")
INT64 = Number("int64")
UINT32S = Pointer("uint32")
REFUSED = Pointer("uint64")
TABLES: dict[str, Number | Pointer | Struct] = {
    "only_gradient": struct_of(TableGradient),
    "gradients": Pointer("int64", struct_of(TableGradient), is_optional=True),
    "num_tables": INT64,
}
GROUPS = Pointer("int64", is_optional=True)


@cache
def _scalars_type(rule: UpdateRule) -> Callable[..., tuple[Any, ...]]:
    return namedtuple("Scalars", rule.fields)


def scalars_of(rule: UpdateRule, scalars: Scalars) -> tuple[Any, ...]:
    """Returns what kernels take for a rule's scalars."""
    return _scalars_type(rule)(*(scalars[name] for name in rule.scalars))


def form_of_scalars(rule: UpdateRule) -> type[FewScalars | ClippedScalars | ScaledScalars]:
    """Returns what kernels take for the scalars of several groups."""
    if rule.is_scaled:
        return ScaledScalars
    return ClippedScalars if rule.is_clipped else FewScalars


def needs_groups(rule: UpdateRule) -> bool:
    """Whether a rule's dense updates are given scalars as those of groups, if only of one."""
    return bool(rule.computed) or has_factors(rule)


def has_factors(rule: UpdateRule) -> bool:
    """Whether kernels find some of its scalars, or which those are, in device memory."""
    return form_of_scalars(rule) is not FewScalars


def few_groups(rule: UpdateRule, storage: Storage) -> int:
    """Returns how many groups' scalars are passed by value."""
    few = min(FEW_GROUPS, FEW_GROUPS_BYTES // scalars_struct(rule, storage).size)
    return few // 2 * 2 if has_factors(rule) else few


def scalars_struct(rule: UpdateRule, storage: Storage) -> Struct:
    """The rule's scalars, in the struct of its header."""
    real = real_of(storage)
    fields = {name: Number(real) for name in rule.fields}
    functor = rule.functor
    return Struct(f"{functor}::Scalars<{CPP_TYPES[real]}>", fields)


def given_scalars(rule: UpdateRule, storage: Storage, has_groups: bool) -> dict[str, Parameter]:
    """The scalars of one group, by value, or of several: by value, or on the device."""
    given = one = scalars_struct(rule, storage)
    if has_groups:
        given = struct_of(form_of_scalars(rule), Scalars=one, count=few_groups(rule, storage))
    return {"scalars": given, "many_scalars": Pointer(real_of(storage), one, is_optional=True)}


def program(
    rule: UpdateRule, storage: Storage, has_groups: bool, **more: str | int
) -> dict[str, str | int]:
    """What a program has besides its rule: see kernels/shared/program.cuh."""
    scalars = given_scalars(rule, storage, has_groups)["scalars"]
    return {**cpp_types(storage), "GivenScalars": scalars.cpp_type, **more}


def arrays_struct(rule: UpdateRule, storage: Storage, codecs: Sequence[Coded]) -> Struct:
    """The addresses of a variable, its slots, the scales of their codes, and its companion."""
    return struct_of(Arrays, count=_num_arrays(rule, storage, codecs))


def _num_arrays(rule: UpdateRule, storage: Storage, codecs: Sequence[Coded] = ()) -> int:
    return 1 + len(rule.slots) + len(codecs) + num_companions(storage)


def types_of_codes(codecs: Sequence[Coded]) -> dict[str, str | int]:
    """Returns what a program has for slots in 8 bits, if there are any; see coded_blocks.cuh."""
    if not codecs:
        return {}
    [per_block] = {each.per_block for each in codecs}
    codes = f"gpuopt::CodesOf<{', '.join(each.cpp_code for each in codecs)}>"
    return {"Codes": codes, "per_block": per_block}


# ---- Kernels that update by dense gradients

_CHUNKS: dict[str, Parameter] = {
    "num_variables": INT64,
    "chunks": Pointer("uint32", struct_of(Chunk)),
    "num_chunks": INT64,
    "chunk_size": INT64,
    "grads": Pointer("int64", is_optional=True),
    "few_grads": struct_of(FewGradients),
}


@cache
def dense_update(
    rule: UpdateRule, storage: Storage, has_groups: bool = False, is_given_sums: bool = False
) -> Kernel:
    """Returns the kernel that updates; see `needs_groups`."""
    first_sum = {"first_sum": rule.scalars.index(rule.sums[0])} if is_given_sums else {}
    has_groups = has_groups or needs_groups(rule)
    more = {
        "widths": Pointer("int64", is_optional=True),
        "sums": Pointer("float64", is_optional=True),
    }
    types = program(rule, storage, has_groups, **first_sum)
    return _of_chunks("dense_update", "dense_update.cu", rule, storage, (), types, more, has_groups)


@cache
def sum_terms(rule: UpdateRule, storage: Storage) -> Kernel:
    types, more = program(rule, storage, True), _variable_sums(rule, storage)
    return _of_chunks("sum_terms", "dense_update.cu", rule, storage, (), types, more)


@cache
def coded_update(rule: UpdateRule, codecs: tuple[Coded, ...], storage: Storage) -> Kernel:
    types = program(rule, storage, True, **types_of_codes(codecs))
    return _of_chunks("coded_update", "coded_update.cu", rule, storage, codecs, types, {})


@cache
def sum_coded_terms(rule: UpdateRule, codecs: tuple[Coded, ...], storage: Storage) -> Kernel:
    types = program(rule, storage, True, **types_of_codes(codecs))
    more = _variable_sums(rule, storage)
    return _of_chunks("sum_coded_terms", "coded_update.cu", rule, storage, codecs, types, more)


def _of_chunks(
    function: str,
    file: str,
    rule: UpdateRule,
    storage: Storage,
    codecs: tuple[Coded, ...],
    types: Mapping[str, str | int],
    more: Mapping[str, Parameter],
    has_groups: bool = True,
) -> Kernel:
    of_variable = CodedVariable if codecs else Variable
    count = _num_arrays(rule, storage, codecs)
    parameters = {
        "variables": Pointer("int64", struct_of(of_variable, count=count)),
        **_CHUNKS,
        "groups": GROUPS,
        **given_scalars(rule, storage, has_groups),
        **more,
        "refused": REFUSED,
    }
    return Kernel(function, parameters, types, rule, file=file, codecs=codecs)


def _variable_sums(rule: UpdateRule, storage: Storage) -> dict[str, Parameter]:
    return {
        "first_chunks": Pointer("int64"),
        "parts": Pointer("float64"),
        "num_done": UINT32S,
        "first_sum": INT32,
        "of_variables": Pointer(real_of(storage), scalars_struct(rule, storage)),
    }


# ---- Kernels that measure and scale gradients, and decide about steps

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


def _decision(decides: bool) -> Struct:
    return struct_of(LossDecision if decides else NoDecision)


def _summed(decides: bool) -> dict[str, Parameter]:
    """What kernels take that sum squares, and make results of the sums, or decide by them."""
    return {**_SUMMED, "decision": _decision(decides)}


@cache
def sum_squares(dtype: str) -> Kernel:
    return Kernel(
        "sum_squares",
        {**_CLIPPED, "sums": Pointer("float64")},
        {"Storage": CPP_TYPES[dtype]},
        file="clip.cu",
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
    )


@cache
def scale_to_norm(dtype: str) -> Kernel:
    real = real_of(dtype)
    return Kernel(
        "scale_to_norm",
        {**_CLIPPED, "norm": Pointer(real), "most": Number(real), "formula": INT32},
        {"Storage": CPP_TYPES[dtype]},
        file="clip.cu",
    )


@cache
def measure(dtype: str, decides: bool = False) -> Kernel:
    return Kernel(
        "measure",
        {**_CLIPPED, **_summed(decides)},
        {"Storage": CPP_TYPES[dtype], "Decision": _decision(decides).cpp_type},
        file="clip.cu",
    )


@cache
def measure_inputs(rule: UpdateRule, storage: Storage, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_inputs",
        {
            **_CLIPPED,
            "variables": Pointer("int64", struct_of(MeasuredVariable)),
            "parts_of_sums": Pointer("float64"),
            "num_done": UINT32S,
            "sums": Pointer("float64"),
            **_summed(decides),
        },
        {**cpp_types(storage), "Decision": _decision(decides).cpp_type},
        rule,
    )


@cache
def measure_rows(dtype: str, key: str, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_rows",
        {
            **TABLES,
            "rows": struct_of(SortedRows, Key=key),
            "run_parts": Pointer(real_of(dtype)),
            "row_width": INT64,
            "lanes_per_row": INT32,
            "refused": REFUSED,
            **_summed(decides),
        },
        {
            "Storage": CPP_TYPES[dtype],
            "Key": CPP_TYPES[key],
            "Decision": _decision(decides).cpp_type,
        },
    )


@cache
def join_sums(decides: bool = False) -> Kernel:
    return Kernel(
        "join_sums",
        {
            "few_sums": struct_of(FewSums),
            "many_sums": Pointer("int64", is_optional=True),
            "num_devices": INT64,
            "num_norms": INT64,
            "rule": struct_of(ClipRule),
            "results": Pointer("float64", struct_of(ClipResult)),
            "decision": _decision(decides),
        },
        {"Decision": _decision(decides).cpp_type},
        file="clip.cu",
    )


# ---- Kernels that check, sort, sum and copy rows, whatever the rule

_SHARES = struct_of(Shares)


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
    )


# ---- Kernels that update rows

_TOUCHED = Pointer("uint32", is_optional=True)
_LATE_TABLE = struct_of(LateTable)
_OF_LATE_TABLES: dict[str, Parameter] = {
    "only_late": _LATE_TABLE,
    "late_tables": Pointer("int64", _LATE_TABLE, is_optional=True),
    "num_done": UINT32S,
}
# The kernels that do the same for slots in 8 bits, and their files.
_OF_CODED_ROWS = {
    "sparse_update": ("update_coded_rows", "coded_rows.cu"),
    "update_other_rows": ("update_other_coded_rows", "coded_rows.cu"),
    "late_update": ("update_late_coded_rows", "late_coded_rows.cu"),
    "bring_up_rows": ("bring_up_coded_rows", "late_coded_rows.cu"),
}


@cache
def sparse_update(
    rule: UpdateRule,
    storage: Storage,
    key: str,
    has_groups: bool = False,
    codecs: tuple[Coded, ...] = (),
) -> Kernel:
    parameters = _of_tables(rule, storage, key, has_groups, codecs, {"touched": _TOUCHED})
    types = program(rule, storage, has_groups, Key=CPP_TYPES[key])
    return _of_rows("sparse_update", "sparse_update.cu", parameters, types, rule, codecs)


@cache
def late_update(
    rule: UpdateRule,
    other_rows: UpdateRule,
    storage: Storage,
    key: str,
    has_groups: bool = False,
    codecs: tuple[Coded, ...] = (),
) -> Kernel:
    parameters = _of_tables(rule, storage, key, has_groups, codecs, _OF_LATE_TABLES)
    types = program(rule, storage, has_groups, Key=CPP_TYPES[key])
    return _of_rows("late_update", "catch_up.cu", parameters, types, rule, codecs, other_rows)


@cache
def bring_up_rows(
    rule: UpdateRule,
    other_rows: UpdateRule,
    storage: Storage,
    index: str,
    codecs: tuple[Coded, ...] = (),
) -> Kernel:
    parameters = {
        "arrays": arrays_struct(rule, storage, codecs),
        "rows": Pointer(index, is_optional=True),
        "num_rows": INT64,
        "height": INT64,
        "row_width": INT64,
        "late": _LATE_TABLE,
        **_lanes(codecs),
    }
    types = program(rule, storage, False, Index=CPP_TYPES[index])
    return _of_rows("bring_up_rows", "catch_up.cu", parameters, types, rule, codecs, other_rows)


@cache
def update_other_rows(
    rule: UpdateRule, storage: Storage, has_groups: bool = False, codecs: tuple[Coded, ...] = ()
) -> Kernel:
    parameters = {
        "arrays": arrays_struct(rule, storage, codecs),
        "size": INT64,
        "row_width": INT64,
        **given_scalars(rule, storage, has_groups),
        "table": INT64,
        "touched": UINT32S,
        "refused": REFUSED,
    }
    types = program(rule, storage, has_groups)
    return _of_rows("update_other_rows", "sparse_update.cu", parameters, types, rule, codecs)


def _of_tables(
    rule: UpdateRule,
    storage: Storage,
    key: str,
    has_groups: bool,
    codecs: tuple[Coded, ...],
    more: Mapping[str, Parameter],
) -> dict[str, Parameter]:
    """What updates of tables take."""
    return {
        **TABLES,
        "only_arrays": arrays_struct(rule, storage, codecs),
        "arrays": Pointer("int64", is_optional=True),
        "rows": struct_of(SortedRows, Key=key),
        "parts": Pointer(real_of(storage)),
        "row_width": INT64,
        **given_scalars(rule, storage, has_groups),
        **more,
        **_lanes(codecs),
        "refused": REFUSED,
    }


def _lanes(codecs: tuple[Coded, ...]) -> dict[str, Parameter]:
    """How many lanes share a row; those of a block of codes follow from its size."""
    return {} if codecs else {"lanes_per_row": INT32}


def _of_rows(
    function: str,
    file: str,
    parameters: Mapping[str, Parameter],
    types: Mapping[str, str | int],
    rule: UpdateRule,
    codecs: tuple[Coded, ...],
    other_rows: UpdateRule | None = None,
) -> Kernel:
    """Returns the kernel of rows without codes, or that of rows with them."""
    if codecs:
        function, file = _OF_CODED_ROWS[function]
    unnamed = {} if other_rows is None else _unnamed(rule, other_rows)
    types = {**types, **types_of_codes(codecs), **unnamed}
    return Kernel(
        function, parameters, types, rule, file=file, other_rows=other_rows, codecs=codecs
    )


def _unnamed(rule: UpdateRule, other_rows: UpdateRule) -> dict[str, str | int]:
    """What happens to rows without a gradient, and to the variable in others; places of scalars."""
    unnamed = other_rows.unnamed
    assert unnamed is not None, "an optimizer without it refuses the option"
    movement = unnamed.movement
    return {
        "Unnamed": unnamed.cpp_type(other_rows.functor, other_rows.slots, other_rows.scalars),
        "Shift": cpp_type(rule.shift, rule.scalars),
        "step_scalar": -1 if movement is None else rule.scalars.index(movement.step),
        "key_scalar": rule.scalars.index(ROUNDING.scalars[0]) if rule.is_rounded else -1,
    }
