"""Updates of arrays that are not all float32, compiled for the CPU from the headers of CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.compiler import build, why_not_compiled
from gpuopt.backends.cpu.forms.compiled import address_of
from gpuopt.backends.cpu.memory import Array
from gpuopt.rules.update_rule import UpdateRule

_REMAINDER = np.dtype(np.uint16)
_STORED = {
    np.dtype(np.float32): "float",
    np.dtype(ml_dtypes.bfloat16): "gpuopt::Bfloat16",
    np.dtype(np.float16): "gpuopt::Float16",
}

_SOURCE = """
{include}
#include "cpu/update_mixed.hpp"

using Rule = {functor};
using Update = gpuopt::MixedUpdate<{types}>;

extern "C" void update_chunks(
    const Update::Chunk* chunks, long long num_chunks, long long* taken) {{
  Update::update_chunks(chunks, num_chunks, taken);
}}
"""


class StoredTypes(NamedTuple):
    """The types of the arrays of an update that computes in float32.

    Attributes:
        var: The variable's.
        beside: That of the array beside it, if there is one: see `Backend.plan_dense`.
        gradient: The gradient's; None if it is zero everywhere.
        slots: Those of the slots, in the rule's order.
    """

    var: np.dtype[Any]
    beside: np.dtype[Any] | None
    gradient: np.dtype[Any] | None
    slots: tuple[np.dtype[Any], ...]

    @property
    def are_known(self) -> bool:
        """Whether there is a compiled form for them."""
        stored = {self.var, *self.slots, self.gradient}
        return stored <= {*_STORED, None} and self.beside in (*_STORED, _REMAINDER, None)

    @property
    def are_halves(self) -> bool:
        """Whether a variable is half of its master copy, of which the rest is beside it."""
        return self.beside == _REMAINDER

    @property
    def names(self) -> str:
        """The types as template arguments of C++."""
        beside = "gpuopt::Alone"
        if self.beside is not None:
            copied = _STORED.get(self.beside)
            beside = f"gpuopt::Copied<{copied}>" if copied else "gpuopt::Split"
        gradient = "gpuopt::Zeros" if self.gradient is None else _STORED[self.gradient]
        slots = [_STORED[each] for each in self.slots]
        return ", ".join([_STORED[self.var], beside, gradient, *slots])


class CompiledMixed:
    """A rule for arrays of certain types, with the scalars of each group.

    Attributes:
        scalars_addresses: Where each group's scalars are.
    """

    def __init__(self, library: ctypes.CDLL, rule: UpdateRule, scalars: Sequence[Scalars]) -> None:
        self._library = library
        self._scalars = np.array(
            [[each[name] for name in rule.scalars] for each in scalars], np.float32
        )
        self.scalars_addresses = [of_group.ctypes.data for of_group in self._scalars]

    def update_chunks(self, table: Array, taken: Array) -> None:
        """Updates chunks until all are taken; threads that call it at once share them.

        Args:
            table: Of intp, contiguous: rows of `MixedChunk` in kernels/cpu/update_mixed.hpp.
            taken: [1] of int64: how many chunks all callers have taken.
        """
        self._library.update_chunks(
            address_of(table), ctypes.c_longlong(len(table)), address_of(taken)
        )


def mixed_library(rule: UpdateRule, types: StoredTypes) -> ctypes.CDLL | None:
    """Returns a rule compiled for arrays of known types; None where it cannot be."""
    return None if why_not_compiled() else _library(rule, types)


@cache
def _library(rule: UpdateRule, types: StoredTypes) -> ctypes.CDLL | None:
    source = _SOURCE.format(
        include=rule.include, functor=rule.functor, types=f"Rule, {types.names}"
    )
    library = build(f"{rule.name}-mixed", source, rule.include_folders)
    if library is not None:
        library.update_chunks.restype = None
    return library
