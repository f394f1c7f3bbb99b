"""Rules compiled for the CPU, from the headers that CUDA compiles."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.host_compiler import build, why_not_compiled
from gpuopt.backends.row_sums import SortedRows
from gpuopt.update_rule import UpdateRule

Chunk = np.ndarray[Any, Any]

_REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
# Rules of other packages have no header among ours, even if a module has the same name.
_OURS = "gpuopt.optimizers."

_SOURCE = """
#include "{header}"
#include "host_update.cuh"

using Rule = {functor};
using Real = {real};
using Scalars = Rule::Scalars<Real>;
static_assert(Rule::num_slots == {num_slots}, "the rule's slots");
static_assert(sizeof(Scalars) == {num_scalars} * sizeof(Real), "the rule's scalars");

extern "C" void pieces(
    const gpuopt::Piece<Rule, Real>* pieces, long long num_pieces, long long* taken,
    const Scalars* scalars) {{
  gpuopt::update_pieces(pieces, num_pieces, taken, *scalars);
}}

extern "C" void rows(
    Real* const* written, long long width, const Real* values, const long long* rows,
    const long long* positions, const long long* starts, long long first, long long last,
    const Scalars* scalars) {{
  gpuopt::update_rows<Rule>(
      written, width, values, rows, positions, starts, first, last, *scalars);
}}
"""


class CompiledRule:
    """A rule with one step's scalars; its calls run without the interpreter's lock."""

    scratch_dtypes: tuple[np.dtype[Any], ...] = ()
    # Threads finish at about the same time.
    most_elements = 128 * 1024

    def __init__(
        self, library: ctypes.CDLL, rule: UpdateRule, real: np.dtype[Any], scalars: Scalars
    ) -> None:
        self._library = library
        self._scalars = np.array([scalars[name] for name in rule.scalars], real)

    def apply(self, written: Sequence[Chunk], grad: Chunk | None, scratch: Sequence[Chunk]) -> None:
        addresses = [0 if array is None else array.ctypes.data for array in (*written, grad)]
        piece = np.array([[*addresses, len(written[0])]], np.intp)
        self.update_pieces(piece, np.zeros(1, np.int64))

    def update_pieces(self, pieces: Chunk, taken: Chunk) -> None:
        """Updates pieces until all are taken; threads that call it at once share them.

        Args:
            pieces: [num_pieces, num_slots + 3] of intp, contiguous: where equally long parts of a
                variable, its slots and its gradient start in memory, and how many elements they
                have. A gradient at 0 is zero everywhere.
            taken: [1] of int64: how many pieces all callers have taken.
        """
        self._library.pieces(
            _address(pieces),
            ctypes.c_longlong(len(pieces)),
            _address(taken),
            _address(self._scalars),
        )

    def update_rows(
        self, written: Sequence[Chunk], values: Chunk, grouped: SortedRows, first: int, last: int
    ) -> None:
        """Updates some of the rows of a table, each by the sum of its values.

        Args:
            written: [height, ...], variable and slots, contiguous.
            values: [num_rows, ...], contiguous, in other memory.
            grouped: From `sort_rows`.
            first: The first of `grouped.rows`.
            last: The one behind the last.
        """
        self._library.rows(
            _addresses(written),
            ctypes.c_longlong(values[0].size),
            _address(values),
            *map(_address, grouped),
            ctypes.c_longlong(first),
            ctypes.c_longlong(last),
            _address(self._scalars),
        )


def compiled_rule(rule: UpdateRule, real: np.dtype[Any], scalars: Scalars) -> CompiledRule | None:
    """Returns the compiled form of a rule, or None where there is nothing to compile it with."""
    if why_not_compiled() is not None or not rule.apply.__module__.startswith(_OURS):
        return None
    library = _library(rule, real)
    return None if library is None else CompiledRule(library, rule, real, scalars)


@cache
def _library(rule: UpdateRule, real: np.dtype[Any]) -> ctypes.CDLL | None:
    source = _SOURCE.format(
        header=rule.header,
        functor=rule.functor,
        real=_REALS[real],
        num_slots=len(rule.slots),
        num_scalars=len(rule.scalars),
    )
    library = build(f"{rule.name}-{real}", source)
    if library is not None:
        library.pieces.restype = library.rows.restype = None
    return library


def _addresses(arrays: Sequence[Chunk]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])


def _address(array: Chunk) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
