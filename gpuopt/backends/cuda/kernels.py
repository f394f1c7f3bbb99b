"""Every kernel with its parameters, by the types that it is compiled for."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.clips import ClipForm
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launch_shapes import (
    CLIP_CHUNK,
    CLIP_THREADS,
    COPY_CHUNK,
    COPY_THREADS,
    DENSE_THREADS,
    DIGIT_BITS,
    FEW_ROWS,
    LANE_CODES,
    MEASURED_ROWS,
    NUM_DIGITS,
    NUM_POWERS,
    PACK_BYTES,
    PIECE,
    PIECE_THREADS,
    POWER_BITS,
    ROWS_PER_WORD,
    SHARES_PER_GROUP,
    SORT_THREADS,
    SORT_TILE,
    STRETCH,
    WARP,
)
from gpuopt.backends.cuda.mixed import Storage, cpp_storage, num_beside, real_of
from gpuopt.backends.cuda.parameters import (
    CPP_TYPES,
    Number,
    Numbers,
    Parameter,
    Pointer,
    Records,
    Struct,
    struct_of,
)
from gpuopt.backends.cuda.structs import (
    FEW_GRADIENTS,
    FEW_GROUPS,
    FEW_GROUPS_BYTES,
    NOTHING_IS_WRONG,
    Chunk,
    ClippedArray,
    ClippedScalars,
    ClipResult,
    ClipRule,
    ClipTotals,
    CopiedRows,
    FewGradients,
    FewScalars,
    IndexList,
    LateTable,
    LossDecision,
    LossScaling,
    ScaledScalars,
    Shares,
    SortedRows,
    TableGradient,
)
from gpuopt.backends.norms import Clipping
from gpuopt.rules.catch_up import OneEarlier
from gpuopt.rules.clipped import ClippedRule
from gpuopt.rules.scaled import ScaledRule
from gpuopt.rules.schedule_formulas import (
    FORMULAS,
    constants_of,
    functor_of,
    piecewise_constant,
)
from gpuopt.rules.slot_codes import BLOCK, Coding, packed_codings, packed_tables
from gpuopt.rules.update_rule import UpdateRule

_INT32 = Number("int32")
_INT64 = Number("int64")
_UINT32S = Pointer("uint32")
_GROUPS = Pointer("int64")
_REFUSED = Pointer("uint64")
_TOUCHED = Pointer("uint32", is_optional=True)
_SHARES = struct_of(Shares)
_LATE_TABLE = struct_of(LateTable)
_CHUNKS: dict[str, Parameter] = {
    "num_variables": _INT64,
    "chunks": Pointer("uint32", struct_of(Chunk)),
    "num_chunks": _INT64,
    "chunk_size": _INT64,
    "grads": Pointer("int64", is_optional=True),
    "few_grads": struct_of(FewGradients),
}
_TABLES: dict[str, Number | Pointer | Struct] = {
    "only_gradient": struct_of(TableGradient),
    "gradients": Pointer("int64", struct_of(TableGradient), is_optional=True),
    "num_tables": _INT64,
}
_CLIPPED: dict[str, Number | Pointer | Struct] = {
    "only": struct_of(ClippedArray),
    "arrays": Pointer("int64", struct_of(ClippedArray), is_optional=True),
    "num_arrays": _INT64,
    "num_chunks": _INT64,
}
_SUMMED: dict[str, Parameter] = {
    "parts": Pointer("float64"),
    "totals": struct_of(ClipTotals),
    "rule": struct_of(ClipRule),
    "results": Pointer("float64", struct_of(ClipResult), is_optional=True),
}
_DECIDING: dict[str, Parameter] = {**_SUMMED, "decision": struct_of(LossDecision)}
# Constants in each file that the host relies on.
_OF_DENSE_UPDATE = {
    "gpuopt::dense_threads": DENSE_THREADS,
    "gpuopt::few_gradients": FEW_GRADIENTS,
}
_OF_SORT_ROWS = {
    "gpuopt::sort_threads": SORT_THREADS,
    "gpuopt::tile_size": SORT_TILE,
    "gpuopt::shares_per_group": SHARES_PER_GROUP,
    "gpuopt::digit_bits": DIGIT_BITS,
    "gpuopt::num_digits": NUM_DIGITS,
}
_OF_TOUCHED_ROWS = {
    "gpuopt::piece_size": PIECE,
    "gpuopt::stretch_size": STRETCH,
    "gpuopt::rows_per_word": ROWS_PER_WORD,
    "gpuopt::warp_size": WARP,
    "gpuopt::pack_bytes": PACK_BYTES,
}
_OF_SPARSE_UPDATE = {**_OF_TOUCHED_ROWS, "gpuopt::piece_threads": PIECE_THREADS}
_OF_CODES = {
    "gpuopt::block_codes": BLOCK,
    "gpuopt::lane_codes": LANE_CODES,
    **{f"gpuopt::coding_{each.name.lower()}": each for each in Coding},
    "sizeof(gpuopt::SlotTables)": packed_tables().shape[1],
}
_OF_CATCH_UP = {
    **_OF_TOUCHED_ROWS,
    "gpuopt::power_bits": POWER_BITS,
    "gpuopt::num_powers": NUM_POWERS,
}
_OF_FACTORS = {
    "gpuopt::clip_tensorflow": ClipForm.TENSORFLOW,
    "gpuopt::clip_torch": ClipForm.TORCH,
    "gpuopt::clip_apex": ClipForm.APEX,
}
_OF_DECISION = {
    "sizeof(gpuopt::LossScaling)": struct_of(LossScaling).size,
    "gpuopt::nothing_is_wrong": NOTHING_IS_WRONG,
}
_OF_MEASURE_ROWS = {
    "gpuopt::clip_threads": CLIP_THREADS,
    "gpuopt::measured_rows": MEASURED_ROWS,
    "gpuopt::warp_size": WARP,
    **_OF_FACTORS,
}
_OF_CLIP = {
    **_OF_FACTORS,
    "gpuopt::clip_threads": CLIP_THREADS,
    "gpuopt::clip_chunk": CLIP_CHUNK,
    "gpuopt::clip_global_norm": Clipping.GLOBAL_NORM,
    "gpuopt::clip_norm_of_one": Clipping.NORM,
    "gpuopt::clip_average_norm": Clipping.AVERAGE_NORM,
}


@cache
def dense_update(rule: UpdateRule, storage: Storage, has_groups: bool = False) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": _scalars(rule, storage)}
    if has_groups:
        scalars = {"groups": _GROUPS, **_scalars_of_groups(rule, storage)}
    return _of_dense_update(
        "dense_update_of_groups" if has_groups else "dense_update",
        {"variables": _variables(rule, storage), **_CHUNKS, **scalars, "refused": _REFUSED},
        rule,
        storage,
    )


@cache
def dense_update_of_rows(rule: UpdateRule, storage: Storage) -> Kernel:
    return _of_dense_update(
        "dense_update_of_rows",
        {
            "variables": _variables(rule, storage),
            **_CHUNKS,
            "groups": _GROUPS,
            "widths": Pointer("int64"),
            **_scalars_of_groups(rule, storage),
            "refused": _REFUSED,
        },
        rule,
        storage,
    )


@cache
def sum_terms(rule: UpdateRule, storage: Storage) -> Kernel:
    return _of_dense_update(
        "sum_terms",
        {
            "variables": _variables(rule, storage),
            **_CHUNKS,
            "groups": _GROUPS,
            **_scalars_of_groups(rule, storage),
            **_variable_sums(rule, storage),
            "refused": _REFUSED,
        },
        rule,
        storage,
    )


def _variable_sums(rule: UpdateRule, storage: Storage) -> dict[str, Parameter]:
    return {
        "first_chunks": Pointer("int64"),
        "parts": Pointer("float64"),
        "num_done": _UINT32S,
        "first_sum": _INT32,
        "of_variables": Pointer(real_of(storage), _scalars(rule, storage)),
    }


def _of_dense_update(
    function: str, parameters: dict[str, Parameter], rule: UpdateRule, storage: Storage
) -> Kernel:
    return Kernel(
        function,
        parameters,
        (rule.require_cuda().functor, cpp_storage(storage)),
        rule,
        file="dense_update.cu",
        constants={**_OF_DENSE_UPDATE, **_of(rule)},
    )


@cache
def coded_update(rule: UpdateRule, codings: tuple[Coding, ...], storage: Storage) -> Kernel:
    return _of_coded_update("coded_update", {}, rule, codings, storage)


@cache
def sum_coded_terms(rule: UpdateRule, codings: tuple[Coding, ...], storage: Storage) -> Kernel:
    sums = _variable_sums(rule, storage)
    return _of_coded_update("sum_coded_terms", sums, rule, codings, storage)


def _of_coded_update(
    function: str,
    more: dict[str, Parameter],
    rule: UpdateRule,
    codings: tuple[Coding, ...],
    storage: Storage,
) -> Kernel:
    return Kernel(
        function,
        {
            "variables": _coded_variables(rule),
            **_CHUNKS,
            "groups": _GROUPS,
            **_scalars_of_groups(rule, storage),
            "words": _UINT32S,
            **more,
            "refused": _REFUSED,
        },
        (rule.require_cuda().functor, str(packed_codings(codings)), cpp_storage(storage)),
        rule,
        file="coded_update.cu",
        constants={**_OF_DENSE_UPDATE, **_OF_CODES, **_of(rule)},
    )


@cache
def check_rows() -> Kernel:
    return Kernel(
        "check_rows",
        {
            "only": struct_of(IndexList),
            "lists": Pointer("int64", struct_of(IndexList), is_optional=True),
            "num_lists": _INT64,
            "num_rows": _INT64,
            "refused": _REFUSED,
        },
    )


@cache
def gather_rows() -> Kernel:
    return Kernel(
        "gather_rows",
        {
            "lists": Pointer("int64", struct_of(IndexList)),
            "num_lists": _INT64,
            "num_rows": _INT64,
            "keys": Pointer("int32"),
            "refused": _REFUSED,
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
            "shift": _INT32,
            "counts": _UINT32S,
            "group_counts": _UINT32S,
            "next_group_counts": _UINT32S,
            "refused": _REFUSED,
        },
        (CPP_TYPES[key],),
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
            "height": _INT64,
            "variable": _INT64,
            "counts": _UINT32S,
            "group_counts": _UINT32S,
            "next_group_counts": _UINT32S,
            "refused": _REFUSED,
        },
        (CPP_TYPES[index],),
        file="sort_rows.cu",
        constants=_OF_SORT_ROWS,
    )


@cache
def move_rows(source: str, key: str) -> Kernel:
    return Kernel(
        "move_rows",
        {
            "keys": Pointer(source),
            "positions": _UINT32S,
            "shares": _SHARES,
            "shift": _INT32,
            "counts": _UINT32S,
            "group_counts": _UINT32S,
            "sorted_keys": Pointer(key),
            "sorted_positions": _UINT32S,
            "refused": _REFUSED,
        },
        (CPP_TYPES[source], CPP_TYPES[key]),
        file="sort_rows.cu",
        constants=_OF_SORT_ROWS,
    )


@cache
def sort_few_rows(source: str, key: str) -> Kernel:
    return Kernel(
        "sort_few_rows",
        {
            "source": Pointer(source),
            "num_rows": _INT64,
            "key_bits": _INT32,
            "sorted_keys": Pointer(key),
            "sorted_positions": _UINT32S,
            "refused": _REFUSED,
        },
        (CPP_TYPES[source], CPP_TYPES[key]),
        constants={**_OF_SORT_ROWS, "gpuopt::few_rows": FEW_ROWS},
    )


@cache
def sum_pieces(dtype: str, key: str) -> Kernel:
    return Kernel(
        "sum_pieces",
        {
            **_TABLES,
            "rows": struct_of(SortedRows, Key=key),
            "row_width": _INT64,
            "parts": Pointer(real_of(dtype)),
            "lanes_per_row": _INT32,
            "refused": _REFUSED,
        },
        (CPP_TYPES[dtype], CPP_TYPES[key]),
        file="sparse_update.cu",
        constants=_OF_SPARSE_UPDATE,
    )


@cache
def sum_runs(dtype: str, key: str) -> Kernel:
    return Kernel(
        "sum_runs",
        {
            "grad": Pointer(dtype),
            "rows": struct_of(SortedRows, Key=key),
            "begins": Pointer("int64"),
            "num_runs": _INT64,
            "parts": Pointer(real_of(dtype)),
            "row_width": _INT64,
            "sums": Pointer(real_of(dtype)),
            "lanes_per_row": _INT32,
        },
        (CPP_TYPES[dtype], CPP_TYPES[key]),
        file="sparse_update.cu",
        constants=_OF_SPARSE_UPDATE,
    )


@cache
def sparse_update(rule: UpdateRule, storage: Storage, key: str, has_groups: bool = False) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": _scalars(rule, storage)}
    return Kernel(
        "sparse_update_of_groups" if has_groups else "sparse_update",
        {
            **_TABLES,
            "only_arrays": _arrays(rule, storage),
            "arrays": Pointer("int64", is_optional=True),
            "rows": struct_of(SortedRows, Key=key),
            "parts": Pointer(real_of(storage)),
            "row_width": _INT64,
            **(_scalars_of_groups(rule, storage) if has_groups else scalars),
            "touched": _TOUCHED,
            "lanes_per_row": _INT32,
            "refused": _REFUSED,
        },
        (rule.require_cuda().functor, cpp_storage(storage), CPP_TYPES[key]),
        rule,
        file="sparse_update.cu",
        constants={**_OF_SPARSE_UPDATE, **_of(rule)},
    )


@cache
def late_update(
    rule: UpdateRule, other_rows: UpdateRule, storage: Storage, key: str, has_groups: bool = False
) -> Kernel:
    numbers: dict[str, Parameter] = {
        "scalars": _scalars(rule, storage),
        "only_late": _LATE_TABLE,
    }
    if has_groups:
        numbers = {
            **_scalars_of_groups(rule, storage),
            "late_tables": Pointer("int64", _LATE_TABLE),
        }
    return Kernel(
        "late_update_of_groups" if has_groups else "late_update",
        {
            **_TABLES,
            "only_arrays": _arrays(rule, storage),
            "arrays": Pointer("int64", is_optional=True),
            "rows": struct_of(SortedRows, Key=key),
            "parts": Pointer(real_of(storage)),
            "row_width": _INT64,
            **numbers,
            "num_done": _UINT32S,
            "lanes_per_row": _INT32,
            "refused": _REFUSED,
        },
        (
            rule.require_cuda().functor,
            *_unnamed(rule, other_rows),
            cpp_storage(storage),
            CPP_TYPES[key],
        ),
        rule,
        file="catch_up.cu",
        constants={**_OF_CATCH_UP, **_of(rule), **_of_late_numbers(other_rows, storage)},
        other_rows=other_rows,
    )


@cache
def bring_up_rows(other_rows: UpdateRule, dtype: str, index: str) -> Kernel:
    return Kernel(
        "bring_up_rows",
        {
            "arrays": _arrays(other_rows, dtype),
            "rows": Pointer(index, is_optional=True),
            "num_rows": _INT64,
            "height": _INT64,
            "row_width": _INT64,
            "late": _LATE_TABLE,
            "lanes_per_row": _INT32,
        },
        (_unnamed(other_rows, other_rows)[0], CPP_TYPES[dtype], CPP_TYPES[index]),
        file="catch_up.cu",
        constants={**_OF_CATCH_UP, **_of_late_numbers(other_rows, dtype)},
        other_rows=other_rows,
    )


@cache
def mark_rows(key: str) -> Kernel:
    return Kernel(
        "mark_rows",
        {
            "rows": struct_of(SortedRows, Key=key),
            "touched": _UINT32S,
            "refused": _REFUSED,
        },
        (CPP_TYPES[key],),
        file="sparse_update.cu",
        constants=_OF_SPARSE_UPDATE,
    )


@cache
def update_other_rows(rule: UpdateRule, storage: Storage, has_groups: bool = False) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": _scalars(rule, storage)}
    of_groups = {**_scalars_of_groups(rule, storage), "table": _INT64}
    return Kernel(
        "update_other_rows_of_groups" if has_groups else "update_other_rows",
        {
            "arrays": _arrays(rule, storage),
            "size": _INT64,
            "row_width": _INT64,
            **(of_groups if has_groups else scalars),
            "touched": _UINT32S,
            "refused": _REFUSED,
        },
        (rule.require_cuda().functor, cpp_storage(storage)),
        rule,
        file="sparse_update.cu",
        constants={**_OF_SPARSE_UPDATE, **_of(rule)},
    )


@cache
def update_coded_rows(
    rule: UpdateRule, codings: tuple[Coding, ...], storage: Storage, key: str
) -> Kernel:
    functor, packed = rule.require_cuda().functor, str(packed_codings(codings))
    return Kernel(
        "update_coded_rows",
        {
            **_TABLES,
            "only_arrays": _coded_arrays(rule),
            "arrays": Pointer("int64", is_optional=True),
            "rows": struct_of(SortedRows, Key=key),
            "parts": Pointer(real_of(storage)),
            "row_width": _INT64,
            **_scalars_of_groups(rule, storage),
            "touched": _TOUCHED,
            "words": _UINT32S,
            "refused": _REFUSED,
        },
        (functor, packed, cpp_storage(storage), CPP_TYPES[key]),
        rule,
        file="coded_rows.cu",
        constants={**_OF_TOUCHED_ROWS, **_OF_CODES, **_of(rule)},
    )


@cache
def update_other_coded_rows(
    rule: UpdateRule, codings: tuple[Coding, ...], storage: Storage, has_groups: bool = False
) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": _scalars(rule, storage)}
    of_groups = {**_scalars_of_groups(rule, storage), "table": _INT64}
    return Kernel(
        "update_other_coded_rows_of_groups" if has_groups else "update_other_coded_rows",
        {
            "arrays": _coded_arrays(rule),
            "size": _INT64,
            "row_width": _INT64,
            **(of_groups if has_groups else scalars),
            "touched": _UINT32S,
            "words": _UINT32S,
            "refused": _REFUSED,
        },
        (rule.require_cuda().functor, str(packed_codings(codings)), cpp_storage(storage)),
        rule,
        file="coded_rows.cu",
        constants={**_OF_TOUCHED_ROWS, **_OF_CODES, **_of(rule)},
    )


@cache
def copy_rows() -> Kernel:
    return Kernel(
        "copy_rows",
        {
            "arrays": Pointer("int64", struct_of(CopiedRows)),
            "num_arrays": _INT64,
            "num_chunks": _INT64,
        },
        constants={"gpuopt::copy_threads": COPY_THREADS, "gpuopt::copy_chunk": COPY_CHUNK},
    )


@cache
def sum_squares(dtype: str) -> Kernel:
    return Kernel(
        "sum_squares",
        {**_CLIPPED, "sums": Pointer("float64")},
        (CPP_TYPES[dtype],),
        file="clip.cu",
        constants=_OF_CLIP,
    )


@cache
def add_squares(real: str) -> Kernel:
    return Kernel(
        "add_squares",
        {
            "sums": Pointer("float64"),
            "num_sums": _INT64,
            "is_root": _INT32,
            "result": Pointer(real),
        },
        (CPP_TYPES[real],),
        file="clip.cu",
        constants=_OF_CLIP,
    )


@cache
def scale_to_norm(dtype: str) -> Kernel:
    real = real_of(dtype)
    return Kernel(
        "scale_to_norm",
        {**_CLIPPED, "norm": Pointer(real), "most": Number(real), "formula": _INT32},
        (CPP_TYPES[dtype],),
        file="clip.cu",
        constants=_OF_CLIP,
    )


@cache
def measure(dtype: str, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_and_decide" if decides else "measure",
        {**_CLIPPED, **(_DECIDING if decides else _SUMMED)},
        (CPP_TYPES[dtype],),
        file="clip.cu",
        constants={**_OF_CLIP, **_OF_DECISION} if decides else _OF_CLIP,
    )


@cache
def measure_rows(dtype: str, key: str, decides: bool = False) -> Kernel:
    return Kernel(
        "measure_rows_and_decide" if decides else "measure_rows",
        {
            **_TABLES,
            "rows": struct_of(SortedRows, Key=key),
            "run_parts": Pointer(real_of(dtype)),
            "row_width": _INT64,
            "lanes_per_row": _INT32,
            "refused": _REFUSED,
            **(_DECIDING if decides else _SUMMED),
        },
        (CPP_TYPES[dtype], CPP_TYPES[key]),
        file="measure_rows.cu",
        constants={**_OF_MEASURE_ROWS, **_OF_DECISION} if decides else _OF_MEASURE_ROWS,
    )


@cache
def join_sums(decides: bool = False) -> Kernel:
    return Kernel(
        "join_and_decide" if decides else "join_sums",
        {
            "sums": Pointer("float64"),
            "num_devices": _INT64,
            "num_norms": _INT64,
            "rule": struct_of(ClipRule),
            "results": Pointer("float64", struct_of(ClipResult)),
            **({"decision": struct_of(LossDecision)} if decides else {}),
        },
        (CPP_TYPES["float64"],) if decides else (),
        file="clip.cu",
        constants={**_OF_CLIP, **_OF_DECISION} if decides else _OF_CLIP,
    )


@cache
def evaluate_schedule(real: str) -> Kernel:
    return Kernel(
        "evaluate_schedule",
        {
            "form": Pointer("float64"),
            "step": Pointer("int64"),
            "count": _INT64,
            "values": Pointer(real),
        },
        (CPP_TYPES[real],),
        constants=_of_formulas(),
    )


@cache
def _scalars_type(rule: UpdateRule) -> Callable[..., tuple[Any, ...]]:
    return namedtuple("Scalars", rule.scalars)


def scalars_of(rule: UpdateRule, scalars: Scalars) -> tuple[Any, ...]:
    """Returns what kernels take for a rule's scalars."""
    return _scalars_type(rule)(*(scalars[name] for name in rule.scalars))


def form_of_scalars(rule: UpdateRule) -> type[FewScalars | ClippedScalars | ScaledScalars]:
    """Returns what kernels take for the scalars of several groups."""
    if isinstance(rule, ScaledRule):
        return ScaledScalars
    return ClippedScalars if isinstance(rule, ClippedRule) else FewScalars


def few_groups(rule: UpdateRule, storage: Storage) -> int:
    """Returns how many groups' scalars are passed by value."""
    few = min(FEW_GROUPS, FEW_GROUPS_BYTES // _scalars(rule, storage).size)
    return few // 2 * 2 if isinstance(rule, ClippedRule) else few


def _of(rule: UpdateRule) -> dict[str, int]:
    """The constants in a rule's header that the host relies on."""
    return {f"{rule.require_cuda().functor}::num_slots": len(rule.slots)}


def _unnamed(rule: UpdateRule, other_rows: UpdateRule) -> tuple[str, str]:
    """What happens to rows without a gradient: a type of C++, and which scalar is the step size."""
    unnamed = other_rows.unnamed
    assert unnamed is not None, "an optimizer without it refuses the option"
    functor, movement = other_rows.require_cuda().functor, unnamed.movement
    step_scalar = -1 if movement is None else rule.scalars.index(movement.step)
    return unnamed.cpp_type(functor, other_rows.slots, other_rows.scalars), str(step_scalar)


def _of_late_numbers(other_rows: UpdateRule, storage: Storage) -> dict[str, int]:
    """The size of what `LateTable.numbers` points to."""
    real = real_of(storage)
    functor = other_rows.require_cuda().functor
    numbers = f"gpuopt::LateNumbers<{functor}, {CPP_TYPES[real]}>"
    return {
        **_of(other_rows),
        f"sizeof({numbers})": (2 + len(OneEarlier._fields) + len(other_rows.scalars))
        * np.dtype(real).itemsize,
    }


def _of_formulas() -> dict[str, int]:
    """The kinds of schedules, and the places of their constants."""
    values = {}
    for kind, formula in enumerate(FORMULAS):
        functor = functor_of(formula)
        values[f"gpuopt::schedule_kind<{functor}>"] = kind
        for place, name in enumerate(constants_of(formula)):
            if formula is not piecewise_constant:
                values[f"{functor}::{name}"] = place
    return values


def _scalars(rule: UpdateRule, storage: Storage) -> Struct:
    """The rule's scalars, in the struct of its header."""
    real = real_of(storage)
    fields = {name: Number(real) for name in rule.scalars}
    functor = rule.require_cuda().functor
    return Struct(f"{functor}::Scalars<{CPP_TYPES[real]}>", fields)


def _scalars_of_groups(rule: UpdateRule, storage: Storage) -> dict[str, Parameter]:
    """The scalars of several groups: by value, or on the device."""
    one = _scalars(rule, storage)
    struct = f"gpuopt::FewScalars<{rule.require_cuda().functor}, {cpp_storage(storage)}>"
    before = [name for name in form_of_scalars(rule)._fields if name != "of"]
    records = Records(one, few_groups(rule, storage))
    return {
        "few_scalars": Struct(struct, {**dict.fromkeys(before, _INT64), "of": records}),
        "many_scalars": Pointer(real_of(storage), one, is_optional=True),
    }


def _variables(rule: UpdateRule, storage: Storage) -> Pointer:
    """The sizes of variables, and the addresses of each, its slots, and what is beside it."""
    name = f"gpuopt::Variable<{rule.require_cuda().functor}, {cpp_storage(storage)}>"
    addresses = Numbers(_INT64, _num_arrays(rule, storage))
    return Pointer("int64", Struct(name, {"size": _INT64, "arrays": addresses}))


def _arrays(rule: UpdateRule, storage: Storage) -> Struct:
    """The addresses of a variable, its slots, and what is beside it."""
    count = _num_arrays(rule, storage)
    return Struct(f"gpuopt::Arrays<{count}>", {"of": Numbers(Number("int64"), count)})


def _num_arrays(rule: UpdateRule, storage: Storage) -> int:
    return 1 + len(rule.slots) + num_beside(storage)


def _coded_variables(rule: UpdateRule) -> Pointer:
    """The sizes and widths of variables, and the addresses of each, its codes and its scales."""
    functor, count = rule.require_cuda().functor, 1 + 2 * len(rule.slots)
    name = f"gpuopt::CodedVariable<{functor}>"
    arrays = Numbers(_INT64, count)
    return Pointer("int64", Struct(name, {"size": _INT64, "width": _INT64, "arrays": arrays}))


def _coded_arrays(rule: UpdateRule) -> Struct:
    """The addresses of a variable, its codes and its scales."""
    count = 1 + 2 * len(rule.slots)
    return Struct(f"gpuopt::Arrays<{count}>", {"of": Numbers(_INT64, count)})
