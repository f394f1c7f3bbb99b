"""Rows that missed steps, brought up to date by C++ compiled from a rule's functor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.compiler import build, why_not_compiled
from gpuopt.backends.cpu.forms.compiled import (
    Chunk,
    CompiledRule,
    RowArguments,
    Stored,
    address_of,
    addresses,
)
from gpuopt.backends.cpu.row_groups import RowGroups
from gpuopt.codecs import Codecs, Plain
from gpuopt.rules.catch_up import OneEarlier
from gpuopt.rules.functions import TYPES
from gpuopt.rules.shift import cpp_type
from gpuopt.rules.update_rule import UpdateRule

_SOURCE = """
{include}
{include_other}
#include "cpu/catch_up.hpp"
{definitions}

using Rule = {functor};
using Real = {real};
using Update = gpuopt::Update<Rule, Real, {codecs}>;
using Unnamed = {unnamed};
using CatchUp = gpuopt::CatchUp<Unnamed, Real>;

extern "C" void bring_up_rows(
    void* const* written, long long width, const long long* rows, long long first, long long last,
    const Update::Scalars* scalars, const CatchUp* catch_up) {{
  gpuopt::bring_up_rows<Update>(written, width, rows, first, last, *scalars, *catch_up);
}}

extern "C" void update_late_rows(
    void* const* written, long long width, const Real* values, const long long* rows,
    const long long* positions, const long long* begins, const long long* firsts, long long first,
    long long last, long long first_number, const Update::Scalars* scalars,
    const CatchUp* catch_up) {{
  gpuopt::update_late_rows<Rule, Update, {shift}>(
      written, width, values, rows, positions, begins, firsts, first, last, first_number, *scalars,
      *catch_up);
}}
"""

_POWERS = 128


class _CatchUp(ctypes.Structure):
    """Mirrors `CatchUp` in kernels/cpu/catch_up.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("last", "steps", "sums", "powers", "scalars")),
        *((name, ctypes.c_longlong) for name in ("now", "window")),
        *((name, ctypes.c_double) for name in ("tolerance", "epsilon", *OneEarlier._fields)),
    )


class CompiledCatchUp:
    """A table's count of steps, as C++ takes it; its calls run without the interpreter's lock."""

    # Of a chunk of rows; see `CompiledRule`.
    most_elements = CompiledRule.most_elements // 4

    def __init__(self, library: ctypes.CDLL, catch_up: CatchUp, real: np.dtype[Any]) -> None:
        self._library = library
        rule, factors = catch_up.rule, catch_up.factors
        movement = None if rule.unnamed is None else rule.unnamed.movement
        scalars = np.array([factors.scalars[name] for name in rule.scalars], real)
        # The arrays whose addresses C++ gets.
        powers = _powers(factors.decays)
        self._kept = catch_up.last, catch_up.steps, catch_up.sums, powers, scalars
        where = [None if array is None else array.ctypes.data for array in self._kept]
        epsilon = 0.0 if movement is None else float(factors.scalars[movement.epsilon])
        one_earlier = map(float, factors.one_earlier or [])
        numbers = catch_up.now, factors.window, factors.tolerance, epsilon
        self._struct = _CatchUp(*where, *numbers, *one_earlier)

    def bring_up_rows(
        self, written: Sequence[Chunk], rows: Chunk | None, first: int, last: int, scalars: Chunk
    ) -> None:
        """Brings rows[first] to rows[last - 1] up to date.

        Args:
            written: [height, ...], the arrays of the variable and its slots, contiguous.
            rows: int64, contiguous, without repeats; None if row k is k.
            first: See above.
            last: See above.
            scalars: The rule's, in its order. Only a key of random bits is read.
        """
        self._call(
            self._library.bring_up_rows,
            addresses(written),
            ctypes.c_longlong(written[0][0].size),
            None if rows is None else address_of(rows),
            ctypes.c_longlong(first),
            ctypes.c_longlong(last),
            address_of(scalars),
        )

    def row_update(
        self,
        scalars: Chunk,
        first_number: int,
        written: Sequence[Chunk],
        values: Chunk,
        groups: RowGroups,
    ) -> Callable[[int, int], object]:
        """Does what `CompiledRows.row_update` does, of rows that are first brought up to date.

        `scalars` are those of the rule that updates the rows, in its order.
        """
        given = RowArguments(written, values, groups, first_number, scalars)
        return partial(given.call, partial(self._call, self._library.update_late_rows))

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments, ctypes.byref(self._struct))


def compiled_catch_up(
    rule: UpdateRule, catch_up: CatchUp, codecs: Codecs, real: np.dtype[Any]
) -> CompiledCatchUp | None:
    """Returns the compiled form for tables that a rule updates, or only stores.

    There is none without a compiler, or if a codec is in numpy alone.
    """
    if why_not_compiled() is not None:
        return None
    library = _library(rule, catch_up.rule, Stored(codecs, Plain(real)), real)
    return None if library is None else CompiledCatchUp(library, catch_up, real)


@cache
def _library(
    rule: UpdateRule, other: UpdateRule, stored: Stored, real: np.dtype[Any]
) -> ctypes.CDLL | None:
    assert other.unnamed is not None, "an optimizer without it refuses the option"
    if stored.cpp is None:
        return None
    source = _SOURCE.format(
        include=rule.include,
        include_other="" if other is rule else other.include,
        definitions=stored.definitions,
        functor=rule.functor,
        codecs=stored.cpp,
        shift=cpp_type(rule.shift, rule.scalars),
        unnamed=other.unnamed.cpp_type(other.functor, other.slots, other.scalars),
        real=TYPES[real.name],
    )
    folders = dict.fromkeys((*rule.include_folders, *other.include_folders))
    name = f"{rule.name}-catch-up-{real if stored.is_plain else 'stored'}"
    library = build(name, source, folders)
    if library is not None:
        library.bring_up_rows.restype = library.update_late_rows.restype = None
    return library


@cache
def _powers(decays: tuple[float, ...]) -> Chunk:
    """Mirrors `Powers` in kernels/cpu/catch_up.hpp, of each slot."""
    exponents = np.arange(_POWERS)
    with np.errstate(all="ignore"):
        each = [
            np.concatenate([decay**exponents, decay ** (_POWERS * exponents), [decay]])
            for decay in np.array(decays)
        ]
    return np.array(each, np.float64)
