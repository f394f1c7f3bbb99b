"""Updates of slots in 8 bits, compiled for the CPU from the headers that CUDA compiles."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.compiler import build, why_not_compiled
from gpuopt.backends.cpu.forms.compiled import address_of
from gpuopt.backends.cpu.memory import Array
from gpuopt.rules.slot_codes import Coding, packed_codings, packed_tables
from gpuopt.rules.update_rule import UpdateRule

_SOURCE = """
{include}
#include "cpu/update_blocks.hpp"

using Rule = {functor};

extern "C" void update_coded_chunks(
    const gpuopt::CodedChunk<Rule>* chunks, long long num_chunks, long long* taken,
    const gpuopt::SlotTables* tables) {{
  gpuopt::update_coded_chunks<{codings}>(chunks, num_chunks, taken, tables);
}}
"""


class CompiledBlocks:
    """A rule of slots in 8 bits, with the scalars of each group.

    Attributes:
        scalars_addresses: Where each group's scalars are.
    """

    def __init__(self, library: ctypes.CDLL, rule: UpdateRule, scalars: Sequence[Scalars]) -> None:
        self._library = library
        self._scalars = np.array(
            [[each[name] for name in rule.scalars] for each in scalars], np.float32
        )
        self._tables = packed_tables()
        self.scalars_addresses = [of_group.ctypes.data for of_group in self._scalars]

    def update_chunks(self, table: Array, taken: Array) -> None:
        """Updates chunks until all are taken; threads that call it at once share them.

        Args:
            table: intp [num_chunks, 2 * num_slots + 7], or one column less with an average,
                contiguous: rows of `CodedChunk`.
            taken: [1] of int64: how many chunks all callers have taken.
        """
        self._library.update_coded_chunks(
            address_of(table),
            ctypes.c_longlong(len(table)),
            address_of(taken),
            address_of(self._tables),
        )


def compiled_blocks(
    rule: UpdateRule, codings: Sequence[Coding], scalars: Sequence[Scalars]
) -> CompiledBlocks | None:
    """Returns the compiled form of a rule for float32 variables; None where there is none."""
    if why_not_compiled() is not None:
        return None
    library = _library(rule, tuple(codings))
    return None if library is None else CompiledBlocks(library, rule, scalars)


@cache
def _library(rule: UpdateRule, codings: tuple[Coding, ...]) -> ctypes.CDLL | None:
    source = _SOURCE.format(
        include=rule.include,
        functor=rule.functor,
        codings=packed_codings(codings),
    )
    library = build(f"{rule.name}-8-bit", source, rule.include_folders)
    if library is not None:
        library.update_coded_chunks.restype = None
    return library
