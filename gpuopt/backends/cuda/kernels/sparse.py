"""Kernels that update rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

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
    given_scalars,
    program,
    types_of_codes,
)
from gpuopt.backends.cuda.launch_shapes import NUM_POWERS, POWER_BITS
from gpuopt.backends.cuda.mixed import Storage, real_of
from gpuopt.backends.cuda.parameters import CPP_TYPES, Parameter, Pointer, Struct, struct_of
from gpuopt.backends.cuda.structs import LateTable, SortedRows
from gpuopt.codecs import Coded
from gpuopt.rules.random_bits import NUM_PARTS
from gpuopt.rules.rounded import ROUNDING
from gpuopt.rules.shift import cpp_type
from gpuopt.rules.update_rule import UpdateRule

_TOUCHED = Pointer("uint32", is_optional=True)
_LATE_TABLE = struct_of(LateTable)
_OF_LATE_TABLES: dict[str, Parameter] = {
    "only_late": _LATE_TABLE,
    "late_tables": Pointer("int64", _LATE_TABLE, is_optional=True),
    "num_done": UINT32S,
}
_OF_CATCH_UP = {
    **OF_TOUCHED_ROWS,
    "gpuopt::power_bits": POWER_BITS,
    "gpuopt::num_powers": NUM_POWERS,
}


@cache
def sparse_update(rule: UpdateRule, storage: Storage, key: str, has_groups: bool = False) -> Kernel:
    return Kernel(
        "sparse_update",
        {
            **_of_sorted_rows(arrays_struct(rule, storage), storage, key),
            **given_scalars(rule, storage, has_groups),
            "touched": _TOUCHED,
            "lanes_per_row": INT32,
            "refused": REFUSED,
        },
        program(rule, storage, has_groups, Key=CPP_TYPES[key]),
        rule,
        constants=OF_SPARSE_UPDATE,
    )


@cache
def late_update(
    rule: UpdateRule, other_rows: UpdateRule, storage: Storage, key: str, has_groups: bool = False
) -> Kernel:
    unnamed = _unnamed(rule, other_rows)
    return Kernel(
        "late_update",
        {
            **_of_sorted_rows(arrays_struct(rule, storage), storage, key),
            **given_scalars(rule, storage, has_groups),
            **_OF_LATE_TABLES,
            "lanes_per_row": INT32,
            "refused": REFUSED,
        },
        program(rule, storage, has_groups, Key=CPP_TYPES[key], **unnamed),
        rule,
        file="catch_up.cu",
        constants={**_OF_CATCH_UP, **_of_late_numbers(other_rows, storage)},
        other_rows=other_rows,
    )


@cache
def bring_up_rows(rule: UpdateRule, other_rows: UpdateRule, storage: Storage, index: str) -> Kernel:
    return Kernel(
        "bring_up_rows",
        {
            "arrays": arrays_struct(rule, storage),
            **_of_rows_brought_up(index),
            "lanes_per_row": INT32,
        },
        program(
            rule,
            storage,
            has_groups=False,
            Index=CPP_TYPES[index],
            **_unnamed(rule, other_rows),
        ),
        rule,
        file="catch_up.cu",
        constants={**_OF_CATCH_UP, **_of_late_numbers(other_rows, storage)},
        other_rows=other_rows,
    )


@cache
def update_other_rows(rule: UpdateRule, storage: Storage, has_groups: bool = False) -> Kernel:
    return Kernel(
        "update_other_rows",
        {
            "arrays": arrays_struct(rule, storage),
            **_of_other_rows(rule, storage, has_groups),
            "refused": REFUSED,
        },
        program(rule, storage, has_groups),
        rule,
        file="sparse_update.cu",
        constants=OF_SPARSE_UPDATE,
    )


@cache
def update_coded_rows(
    rule: UpdateRule, codecs: tuple[Coded, ...], storage: Storage, key: str
) -> Kernel:
    return Kernel(
        "update_coded_rows",
        {
            **_of_sorted_rows(coded_arrays(rule, codecs, storage), storage, key),
            **given_scalars(rule, storage, True),
            "touched": _TOUCHED,
            "refused": REFUSED,
        },
        program(rule, storage, True, Key=CPP_TYPES[key], **types_of_codes(codecs)),
        rule,
        file="coded_rows.cu",
        constants={**OF_TOUCHED_ROWS, **OF_CODES},
        codecs=codecs,
    )


@cache
def update_late_coded_rows(
    rule: UpdateRule, other_rows: UpdateRule, codecs: tuple[Coded, ...], storage: Storage, key: str
) -> Kernel:
    parameters = {
        **_of_sorted_rows(coded_arrays(rule, codecs, storage), storage, key),
        **given_scalars(rule, storage, True),
        **_OF_LATE_TABLES,
        "refused": REFUSED,
    }
    types = {"has_groups": True, "Key": CPP_TYPES[key]}
    name = "update_late_coded_rows"
    return _late_coded(name, parameters, types, rule, other_rows, codecs, storage)


@cache
def bring_up_coded_rows(
    rule: UpdateRule,
    other_rows: UpdateRule,
    codecs: tuple[Coded, ...],
    storage: Storage,
    index: str,
) -> Kernel:
    parameters = {"arrays": coded_arrays(rule, codecs, storage), **_of_rows_brought_up(index)}
    types = {"has_groups": False, "Index": CPP_TYPES[index]}
    name = "bring_up_coded_rows"
    return _late_coded(name, parameters, types, rule, other_rows, codecs, storage)


@cache
def update_other_coded_rows(
    rule: UpdateRule, codecs: tuple[Coded, ...], storage: Storage, has_groups: bool = False
) -> Kernel:
    return Kernel(
        "update_other_coded_rows",
        {
            "arrays": coded_arrays(rule, codecs, storage),
            **_of_other_rows(rule, storage, has_groups),
            "refused": REFUSED,
        },
        program(rule, storage, has_groups, **types_of_codes(codecs)),
        rule,
        file="coded_rows.cu",
        constants={**OF_TOUCHED_ROWS, **OF_CODES},
        codecs=codecs,
    )


def _of_sorted_rows(arrays: Struct, storage: Storage, key: str) -> dict[str, Parameter]:
    """What updates of tables take: their gradients and arrays, and the sorted rows."""
    return {
        **TABLES,
        "only_arrays": arrays,
        "arrays": Pointer("int64", is_optional=True),
        "rows": struct_of(SortedRows, Key=key),
        "parts": Pointer(real_of(storage)),
        "row_width": INT64,
    }


def _late_coded(
    name: str,
    parameters: Mapping[str, Parameter],
    types: Mapping[str, Any],
    rule: UpdateRule,
    other_rows: UpdateRule,
    codecs: tuple[Coded, ...],
    storage: Storage,
) -> Kernel:
    """Returns a kernel of late_coded_rows.cu."""
    more = {**types, **types_of_codes(codecs), **_unnamed(rule, other_rows)}
    return Kernel(
        name,
        parameters,
        program(rule, storage, **more),
        rule,
        file="late_coded_rows.cu",
        constants={**_OF_CATCH_UP, **OF_CODES, **_of_late_numbers(other_rows, storage)},
        other_rows=other_rows,
        codecs=codecs,
    )


def _of_rows_brought_up(index: str) -> dict[str, Parameter]:
    """What kernels take that bring rows up to date, after the arrays."""
    return {
        "rows": Pointer(index, is_optional=True),
        "num_rows": INT64,
        "height": INT64,
        "row_width": INT64,
        "late": _LATE_TABLE,
    }


def _of_other_rows(rule: UpdateRule, storage: Storage, has_groups: bool) -> dict[str, Parameter]:
    """What updates of rows without a gradient take, after the arrays."""
    return {
        "size": INT64,
        "row_width": INT64,
        **given_scalars(rule, storage, has_groups),
        "table": INT64,
        "touched": UINT32S,
    }


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


def _of_late_numbers(other_rows: UpdateRule, storage: Storage) -> dict[str, int]:
    """The size of what `LateTable.numbers` points to."""
    real = real_of(storage)
    functor = other_rows.functor
    numbers = f"gpuopt::LateNumbers<{functor}, {CPP_TYPES[real]}>"
    return {
        f"sizeof({numbers})": (NUM_PARTS + 2 + len(other_rows.scalars)) * np.dtype(real).itemsize,
        "gpuopt::num_key_parts": NUM_PARTS,
    }
