"""Rules compiled for the CPU, from the headers that CUDA compiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count, repeat
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.compiler import build, why_not_compiled
from gpuopt.backends.cpu.memory import scratch
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.row_groups import RowGroups, group_rows
from gpuopt.codecs import Codec, Codecs, Plain
from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import UpdateRule

Chunk = np.ndarray[Any, Any]
Walk = Literal["chunks", "rows"]
# Takes a table's arrays, values and groups of rows; see `CompiledRows.row_update`.
RowUpdate = Callable[[Sequence[Chunk], Chunk, RowGroups], Callable[[int, int], object]]

REALS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}

_SOURCE = """
{include}
#include "cpu/update.hpp"
{definitions}

using Rule = {functor};
using Real = {real};
using Update = gpuopt::Update<Rule, Real, {codecs}>;
"""

# The function that a library exports. Each walk is a library, as most rules need only one.
_WALKS = {
    "chunks": """
extern "C" void update_chunks(
    const Update::Chunk* chunks, long long num_chunks, long long* taken) {
  Update::update_chunks(chunks, num_chunks, taken);
}
""",
    "rows": """
extern "C" void update_rows(
    void* const* arrays, long long width, const Real* values, const long long* rows,
    const long long* positions, const long long* begins, const long long* firsts, long long first,
    long long last, long long first_number, const Update::Scalars* scalars) {
  Update::update_rows(
      arrays, width, values, rows, positions, begins, firsts, first, last, first_number, *scalars);
}
""",
}

_GROUP_ROWS = """
#include "cpu/row_groups.hpp"

extern "C" long long group_rows_int32(
    const std::int32_t* indices, long long size, long long first, int bucket_bits,
    std::int32_t* work, long long* rows, long long* positions, long long* begins,
    long long* firsts) {
  return gpuopt::group_rows(
      indices, size, first, bucket_bits, work, rows, positions, begins, firsts);
}

extern "C" long long group_rows_int64(
    const std::int64_t* indices, long long size, long long first, int bucket_bits,
    std::int32_t* work, long long* rows, long long* positions, long long* begins,
    long long* firsts) {
  return gpuopt::group_rows(
      indices, size, first, bucket_bits, work, rows, positions, begins, firsts);
}
"""

# Of a sparse gradient: its positions are counted in 32 bits.
_MOST_ROWS = 2**31 - 1


class Stored(NamedTuple):
    """How the arrays of an update are stored.

    Attributes:
        codecs: The codecs of the variable and its slots.
        gradient: The gradient's codec.
    """

    codecs: Codecs
    gradient: Codec

    @property
    def is_plain(self) -> bool:
        """Whether all arrays are of the type that rules compute in."""
        return self.codecs.are_plain and isinstance(self.gradient, Plain)

    @property
    def cpp(self) -> str | None:
        """The codecs as template arguments of C++; None if one is in numpy alone."""
        names = [each.cpp for each in (self.gradient, *self.codecs.every)]
        return None if None in names else ", ".join(map(str, names))

    @property
    def definitions(self) -> str:
        """C++ that the codecs need, each piece once."""
        every = (self.gradient, *self.codecs.every)
        return "\n".join(dict.fromkeys(each for codec in every for each in codec.definitions))


class CompiledRule:
    """A rule with one step's scalars; its calls run without the interpreter's lock.

    Attributes:
        scalars: The step's, in the rule's order.
        stored: How the arrays that it updates are stored.
    """

    scratch_dtypes: tuple[np.dtype[Any], ...] = ()
    # Short enough that all threads finish at about the same time.
    most_elements = 128 * 1024

    def __init__(
        self, library: ctypes.CDLL, stored: Stored, scalars: Chunk, scalars_address: int
    ) -> None:
        self._library = library
        self.stored = stored
        self.scalars = scalars
        self.scalars_address = scalars_address

    def apply(
        self,
        written: Sequence[Chunk],
        grad: Chunk | None,
        scratch: Sequence[Chunk],
        numbers: Numbers | None = None,
    ) -> None:
        addresses = [0 if array is None else array.ctypes.data for array in (*written, grad)]
        num_rows = len(written[-1])
        shape = num_rows, len(written[0]) // num_rows
        firsts = (0, 0) if numbers is None else (numbers.first, numbers.of_variable)
        table = np.array([[*addresses, *shape, *firsts, self.scalars_address]], np.intp)
        self.update_chunks(table, np.zeros(1, np.int64))

    def update_chunks(self, table: Chunk, taken: Chunk) -> None:
        """Updates chunks until all are taken; threads that call it at once share them.

        Args:
            table: Of intp, contiguous: each row is an `Update::Chunk` of kernels/cpu/update.hpp.
            taken: [1] of int64: how many chunks all callers have taken.
        """
        self._library.update_chunks(
            address_of(table),
            ctypes.c_longlong(len(table)),
            address_of(taken),
        )


class CompiledRows:
    """A rule with one step's scalars, for rows of a table.

    Attributes:
        stored: How the arrays that it updates are stored.
    """

    def __init__(self, library: ctypes.CDLL, stored: Stored, scalars: Chunk) -> None:
        self._library = library
        self.stored = stored
        self._scalars = scalars

    def row_update(
        self, first_number: int, written: Sequence[Chunk], values: Chunk, groups: RowGroups
    ) -> Callable[[int, int], object]:
        """Returns what updates some of the rows of a table, each by the sum of its values.

        It takes the first of `groups.rows` that is updated, and the one behind the last.

        Args:
            first_number: See `Target`.
            written: [height, ...], the arrays of the variable and its slots, contiguous.
            values: [num_rows, ...], contiguous, in other memory.
            groups: From `group_rows`, here or there.
        """
        given = RowArguments(written, values, groups, first_number, self._scalars)
        return partial(given.call, self._library.update_rows)


def compiled_rules(
    rule: UpdateRule,
    real: np.dtype[Any],
    scalars: Sequence[Scalars],
    stored: Stored | None = None,
) -> list[CompiledRule]:
    """Returns the compiled form of a rule, for the scalars of each group.

    The list is empty without a compiler, or if C++ cannot update arrays that are stored so.

    Args:
        rule: What to compute.
        real: The type that it computes in.
        scalars: The rule's scalars, of that type: those of each group.
        stored: How arrays are stored; None if all are of that type.
    """
    if why_not_compiled() is not None:
        return []
    stored = stored or stored_plainly(rule, real)
    library = _library(rule, real, stored, "chunks")
    if library is None:
        return []
    values = np.array([_in_order(rule, each) for each in scalars], real)
    # numpy takes longer to say where an array is than Python to add.
    places = count(values.ctypes.data, values.strides[0])
    return list(map(CompiledRule, repeat(library), repeat(stored), values, places))


def compiled_rows(
    rule: UpdateRule, real: np.dtype[Any], scalars: Scalars, stored: Stored | None = None
) -> CompiledRows | None:
    """Returns the compiled form of a rule for rows of a table; None where there is none.

    Args:
        rule: See `compiled_rules`.
        real: Likewise.
        scalars: The rule's scalars, of that type.
        stored: See `compiled_rules`. The values that are summed are of that type.
    """
    if why_not_compiled() is not None:
        return None
    stored = stored or stored_plainly(rule, real)
    library = _library(rule, real, stored, "rows")
    if library is None:
        return None
    return CompiledRows(library, stored, np.array(_in_order(rule, scalars), real))


def _in_order(rule: UpdateRule, scalars: Scalars) -> list[Any]:
    return [scalars[name] for name in rule.scalars]


def compiled_groups(indices: Chunk, first: int) -> RowGroups:
    """Does what `row_groups.group_rows` does; rows are in the order of their first appearance.

    Args:
        indices: [num_rows], non-negative, int32 or int64.
        first: The sorted position of the least index. `firsts` are right where an index occurs
            three times or more: sums of one or two rows do not depend on them.
    """
    size, library = len(indices), _group_library()
    if library is None or size > _MOST_ROWS:
        return group_rows(indices, first)
    indices = np.require(indices, requirements=["C", "ALIGNED"])
    # A quarter of the buckets is used: few rows share one.
    bucket_bits = (4 * size - 1).bit_length()
    [work] = scratch([np.dtype(np.int32)], (1 << bucket_bits) + 6 * size)
    rows, positions, begins, firsts = np.empty((4, size + 1), np.int64)
    group = library.group_rows_int32 if indices.itemsize == 4 else library.group_rows_int64
    num_rows = group(
        address_of(indices),
        ctypes.c_longlong(size),
        ctypes.c_longlong(first),
        ctypes.c_int(bucket_bits),
        *map(address_of, (work, rows, positions, begins, firsts)),
    )
    return RowGroups(rows[:num_rows], positions[:size], begins[: num_rows + 1], firsts[:num_rows])


@cache
def _group_library() -> ctypes.CDLL | None:
    library = build("row_groups", _GROUP_ROWS, [kernel_root()])
    if library is not None:
        library.group_rows_int32.restype = ctypes.c_longlong
        library.group_rows_int64.restype = ctypes.c_longlong
    return library


@cache
def stored_plainly(rule: UpdateRule, real: np.dtype[Any]) -> Stored:
    """Returns how a rule's arrays are stored if all are of the type that it computes in."""
    plain = Plain(real)
    return Stored(Codecs(plain, (plain,) * len(rule.slots)), plain)


@cache
def _library(
    rule: UpdateRule, real: np.dtype[Any], stored: Stored, walk: Walk
) -> ctypes.CDLL | None:
    codecs, is_plain = stored.codecs, stored.is_plain
    if codecs.are_plain and rule.stored is not None:
        return None  # the rule depends on the stored type, and these would be decoded copies
    if not is_plain and (rule.row_slots or stored.cpp is None):
        return None
    source = _SOURCE.format(
        include=rule.include,
        definitions=stored.definitions,
        functor=rule.functor,
        real=REALS[real],
        codecs=stored.cpp,
    )
    name = f"{rule.name}-{real if is_plain else 'stored'}-{walk}"
    library = build(name, source + _WALKS[walk], rule.include_folders)
    if library is not None:
        getattr(library, f"update_{walk}").restype = None
    return library


class RowArguments:
    """What C++ functions take that update rows; see `CompiledRule.row_update`.

    numpy takes longer to say where an array is than C++ to update some rows: so it is asked once.
    A thread that has not ended yet keeps the arrays.
    """

    def __init__(
        self,
        written: Sequence[Chunk],
        values: Chunk,
        groups: RowGroups,
        first_number: int,
        scalars: Chunk,
    ) -> None:
        self._kept = written, values, groups, scalars
        width = ctypes.c_longlong(values[0].size)
        self._first = addresses(written), width, address_of(values), *map(address_of, groups)
        self._last = ctypes.c_longlong(first_number), address_of(scalars)

    def call(self, update: Callable[..., object], first: int, last: int) -> None:
        """Calls a function for the rows from `first` to `last - 1`."""
        update(*self._first, ctypes.c_longlong(first), ctypes.c_longlong(last), *self._last)


def addresses(arrays: Sequence[Chunk]) -> Any:
    """Returns where arrays are in memory, as a C++ function takes it."""
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])


def address_of(array: Chunk) -> ctypes.c_void_p:
    """Returns where an array is in memory, as a C++ function takes it."""
    return ctypes.c_void_p(array.ctypes.data)
