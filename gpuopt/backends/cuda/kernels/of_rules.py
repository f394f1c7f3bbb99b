"""Parameters of a rule: its scalars, and the arrays of its variables."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cuda.mixed import Storage, cpp_types, num_beside, real_of
from gpuopt.backends.cuda.parameters import (
    CPP_TYPES,
    Number,
    Parameter,
    Pointer,
    Struct,
    struct_of,
)
from gpuopt.backends.cuda.structs import (
    FEW_GROUPS,
    FEW_GROUPS_BYTES,
    Arrays,
    ClippedScalars,
    CodedVariable,
    FewScalars,
    ScaledScalars,
    Variable,
)
from gpuopt.codecs import Coded
from gpuopt.rules.update_rule import UpdateRule

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


def variables(rule: UpdateRule, storage: Storage) -> Pointer:
    """The sizes of variables, and the addresses of each, its slots, and what is beside it."""
    return Pointer("int64", struct_of(Variable, count=_num_arrays(rule, storage)))


def arrays_struct(rule: UpdateRule, storage: Storage) -> Struct:
    """The addresses of a variable, its slots, and what is beside it."""
    return struct_of(Arrays, count=_num_arrays(rule, storage))


def _num_arrays(rule: UpdateRule, storage: Storage) -> int:
    return 1 + len(rule.slots) + num_beside(storage)


def coded_variables(rule: UpdateRule, codecs: Sequence[Coded], storage: Storage) -> Pointer:
    """The sizes and widths of variables, and the addresses of the arrays of each."""
    count = _num_arrays(rule, storage) + len(codecs)
    return Pointer("int64", struct_of(CodedVariable, count=count))


def coded_arrays(rule: UpdateRule, codecs: Sequence[Coded], storage: Storage) -> Struct:
    """The addresses of a variable, its codes and their scales, and what is beside it."""
    return struct_of(Arrays, count=_num_arrays(rule, storage) + len(codecs))


def types_of_codes(codecs: Sequence[Coded]) -> dict[str, str | int]:
    """Returns what a program has for slots in 8 bits; see coded_blocks.cuh."""
    [per_block] = {each.per_block for each in codecs}
    codes = f"gpuopt::CodesOf<{', '.join(each.cpp_code for each in codecs)}>"
    return {"Codes": codes, "per_block": per_block}
