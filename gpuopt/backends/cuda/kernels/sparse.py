"""Kernels that update rows."""

from __future__ import annotations

from functools import cache

import numpy as np

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.kernels.common import (
    INT32,
    INT64,
    OF_CODES,
    OF_SPARSE_UPDATE,
    OF_TOUCHED_ROWS,
    REFUSED,
    TABLES,
    UINT32S,
)
from gpuopt.backends.cuda.kernels.of_rules import (
    arrays_struct,
    coded_arrays,
    scalars_of_groups,
    scalars_struct,
)
from gpuopt.backends.cuda.launch_shapes import NUM_POWERS, POWER_BITS
from gpuopt.backends.cuda.mixed import Storage, cpp_storage, real_of
from gpuopt.backends.cuda.parameters import CPP_TYPES, Parameter, Pointer, struct_of
from gpuopt.backends.cuda.structs import LateTable, SortedRows
from gpuopt.rules.shift import cpp_type
from gpuopt.rules.slot_codes import Coding, packed_codings
from gpuopt.rules.update_rule import UpdateRule

_TOUCHED = Pointer("uint32", is_optional=True)
_LATE_TABLE = struct_of(LateTable)
_OF_CATCH_UP = {
    **OF_TOUCHED_ROWS,
    "gpuopt::power_bits": POWER_BITS,
    "gpuopt::num_powers": NUM_POWERS,
}


@cache
def sparse_update(rule: UpdateRule, storage: Storage, key: str, has_groups: bool = False) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": scalars_struct(rule, storage)}
    return Kernel(
        "sparse_update_of_groups" if has_groups else "sparse_update",
        {
            **TABLES,
            "only_arrays": arrays_struct(rule, storage),
            "arrays": Pointer("int64", is_optional=True),
            "rows": struct_of(SortedRows, Key=key),
            "parts": Pointer(real_of(storage)),
            "row_width": INT64,
            **(scalars_of_groups(rule, storage) if has_groups else scalars),
            "touched": _TOUCHED,
            "lanes_per_row": INT32,
            "refused": REFUSED,
        },
        (rule.functor, cpp_storage(storage), CPP_TYPES[key]),
        rule,
        file="sparse_update.cu",
        constants=OF_SPARSE_UPDATE,
    )


@cache
def late_update(
    rule: UpdateRule, other_rows: UpdateRule, storage: Storage, key: str, has_groups: bool = False
) -> Kernel:
    numbers: dict[str, Parameter] = {
        "scalars": scalars_struct(rule, storage),
        "only_late": _LATE_TABLE,
    }
    if has_groups:
        numbers = {
            **scalars_of_groups(rule, storage),
            "late_tables": Pointer("int64", _LATE_TABLE),
        }
    return Kernel(
        "late_update_of_groups" if has_groups else "late_update",
        {
            **TABLES,
            "only_arrays": arrays_struct(rule, storage),
            "arrays": Pointer("int64", is_optional=True),
            "rows": struct_of(SortedRows, Key=key),
            "parts": Pointer(real_of(storage)),
            "row_width": INT64,
            **numbers,
            "num_done": UINT32S,
            "lanes_per_row": INT32,
            "refused": REFUSED,
        },
        (
            rule.functor,
            *_unnamed(rule, other_rows),
            cpp_storage(storage),
            CPP_TYPES[key],
        ),
        rule,
        file="catch_up.cu",
        constants={
            **_OF_CATCH_UP,
            **_of_late_numbers(other_rows, storage),
        },
        other_rows=other_rows,
    )


@cache
def bring_up_rows(other_rows: UpdateRule, dtype: str, index: str) -> Kernel:
    return Kernel(
        "bring_up_rows",
        {
            "arrays": arrays_struct(other_rows, dtype),
            "rows": Pointer(index, is_optional=True),
            "num_rows": INT64,
            "height": INT64,
            "row_width": INT64,
            "late": _LATE_TABLE,
            "lanes_per_row": INT32,
        },
        (_unnamed(other_rows, other_rows)[0], CPP_TYPES[dtype], CPP_TYPES[index]),
        file="catch_up.cu",
        constants={**_OF_CATCH_UP, **_of_late_numbers(other_rows, dtype)},
        other_rows=other_rows,
    )


@cache
def update_other_rows(rule: UpdateRule, storage: Storage, has_groups: bool = False) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": scalars_struct(rule, storage)}
    of_groups = {**scalars_of_groups(rule, storage), "table": INT64}
    return Kernel(
        "update_other_rows_of_groups" if has_groups else "update_other_rows",
        {
            "arrays": arrays_struct(rule, storage),
            "size": INT64,
            "row_width": INT64,
            **(of_groups if has_groups else scalars),
            "touched": UINT32S,
            "refused": REFUSED,
        },
        (rule.functor, cpp_storage(storage)),
        rule,
        file="sparse_update.cu",
        constants=OF_SPARSE_UPDATE,
    )


@cache
def update_coded_rows(
    rule: UpdateRule, codings: tuple[Coding, ...], storage: Storage, key: str
) -> Kernel:
    functor, packed = rule.functor, str(packed_codings(codings))
    return Kernel(
        "update_coded_rows",
        {
            **TABLES,
            "only_arrays": coded_arrays(rule),
            "arrays": Pointer("int64", is_optional=True),
            "rows": struct_of(SortedRows, Key=key),
            "parts": Pointer(real_of(storage)),
            "row_width": INT64,
            **scalars_of_groups(rule, storage),
            "touched": _TOUCHED,
            "words": UINT32S,
            "refused": REFUSED,
        },
        (functor, packed, cpp_storage(storage), CPP_TYPES[key]),
        rule,
        file="coded_rows.cu",
        constants={**OF_TOUCHED_ROWS, **OF_CODES},
    )


@cache
def update_other_coded_rows(
    rule: UpdateRule, codings: tuple[Coding, ...], storage: Storage, has_groups: bool = False
) -> Kernel:
    scalars: dict[str, Parameter] = {"scalars": scalars_struct(rule, storage)}
    of_groups = {**scalars_of_groups(rule, storage), "table": INT64}
    return Kernel(
        "update_other_coded_rows_of_groups" if has_groups else "update_other_coded_rows",
        {
            "arrays": coded_arrays(rule),
            "size": INT64,
            "row_width": INT64,
            **(of_groups if has_groups else scalars),
            "touched": UINT32S,
            "words": UINT32S,
            "refused": REFUSED,
        },
        (rule.functor, str(packed_codings(codings)), cpp_storage(storage)),
        rule,
        file="coded_rows.cu",
        constants={**OF_TOUCHED_ROWS, **OF_CODES},
    )


def _unnamed(rule: UpdateRule, other_rows: UpdateRule) -> tuple[str, str, str]:
    """What happens to rows without a gradient, and to the variable in others; the step's scalar.

    The first two are types of C++.
    """
    unnamed = other_rows.unnamed
    assert unnamed is not None, "an optimizer without it refuses the option"
    functor, movement = other_rows.functor, unnamed.movement
    step_scalar = -1 if movement is None else rule.scalars.index(movement.step)
    of_others = unnamed.cpp_type(functor, other_rows.slots, other_rows.scalars)
    return of_others, cpp_type(rule), str(step_scalar)


def _of_late_numbers(other_rows: UpdateRule, storage: Storage) -> dict[str, int]:
    """The size of what `LateTable.numbers` points to."""
    real = real_of(storage)
    functor = other_rows.functor
    numbers = f"gpuopt::LateNumbers<{functor}, {CPP_TYPES[real]}>"
    return {
        f"sizeof({numbers})": (2 + len(other_rows.scalars)) * np.dtype(real).itemsize,
    }
