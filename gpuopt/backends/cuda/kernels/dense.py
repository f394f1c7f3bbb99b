"""Kernels that update by dense gradients."""

from __future__ import annotations

from functools import cache

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.kernels.common import INT32, INT64, OF_CODES, REFUSED, UINT32S
from gpuopt.backends.cuda.kernels.of_rules import (
    GROUPS,
    coded_variables,
    given_scalars,
    needs_groups,
    program,
    scalars_struct,
    types_of_codes,
    variables,
)
from gpuopt.backends.cuda.launch_shapes import DENSE_THREADS
from gpuopt.backends.cuda.mixed import Storage, real_of
from gpuopt.backends.cuda.parameters import Parameter, Pointer, struct_of
from gpuopt.backends.cuda.structs import Chunk, FewGradients
from gpuopt.codecs import Coded
from gpuopt.rules.update_rule import UpdateRule

_CHUNKS: dict[str, Parameter] = {
    "num_variables": INT64,
    "chunks": Pointer("uint32", struct_of(Chunk)),
    "num_chunks": INT64,
    "chunk_size": INT64,
    "grads": Pointer("int64", is_optional=True),
    "few_grads": struct_of(FewGradients),
}
# A constant that the host relies on.
_OF_DENSE_UPDATE = {"gpuopt::dense_threads": DENSE_THREADS}


@cache
def dense_update(
    rule: UpdateRule, storage: Storage, has_groups: bool = False, is_given_sums: bool = False
) -> Kernel:
    """Returns the kernel that updates; see `needs_groups`."""
    first_sum = {"first_sum": rule.scalars.index(rule.sums[0])} if is_given_sums else {}
    has_groups = has_groups or needs_groups(rule)
    return Kernel(
        "dense_update",
        {
            "variables": variables(rule, storage),
            **_CHUNKS,
            "groups": GROUPS,
            **given_scalars(rule, storage, has_groups),
            "widths": Pointer("int64", is_optional=True),
            "sums": Pointer("float64", is_optional=True),
            "refused": REFUSED,
        },
        program(rule, storage, has_groups, **first_sum),
        rule,
        constants=_OF_DENSE_UPDATE,
    )


@cache
def sum_terms(rule: UpdateRule, storage: Storage) -> Kernel:
    return Kernel(
        "sum_terms",
        {
            "variables": variables(rule, storage),
            **_CHUNKS,
            "groups": GROUPS,
            **given_scalars(rule, storage, True),
            **_variable_sums(rule, storage),
            "refused": REFUSED,
        },
        program(rule, storage, True),
        rule,
        file="dense_update.cu",
        constants=_OF_DENSE_UPDATE,
    )


def _variable_sums(rule: UpdateRule, storage: Storage) -> dict[str, Parameter]:
    return {
        "first_chunks": Pointer("int64"),
        "parts": Pointer("float64"),
        "num_done": UINT32S,
        "first_sum": INT32,
        "of_variables": Pointer(real_of(storage), scalars_struct(rule, storage)),
    }


@cache
def coded_update(rule: UpdateRule, codecs: tuple[Coded, ...], storage: Storage) -> Kernel:
    return _of_coded_update("coded_update", {}, rule, codecs, storage)


@cache
def sum_coded_terms(rule: UpdateRule, codecs: tuple[Coded, ...], storage: Storage) -> Kernel:
    sums = _variable_sums(rule, storage)
    return _of_coded_update("sum_coded_terms", sums, rule, codecs, storage)


def _of_coded_update(
    function: str,
    more: dict[str, Parameter],
    rule: UpdateRule,
    codecs: tuple[Coded, ...],
    storage: Storage,
) -> Kernel:
    return Kernel(
        function,
        {
            "variables": coded_variables(rule, codecs, storage),
            **_CHUNKS,
            "groups": GROUPS,
            **given_scalars(rule, storage, True),
            **more,
            "refused": REFUSED,
        },
        program(rule, storage, True, **types_of_codes(codecs)),
        rule,
        file="coded_update.cu",
        constants={**_OF_DENSE_UPDATE, **OF_CODES},
        codecs=codecs,
    )
