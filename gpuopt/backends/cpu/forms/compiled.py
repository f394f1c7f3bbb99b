"""Rules compiled for the CPU, from the headers that CUDA compiles."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.compiler import build, why_not_compiled
from gpuopt.backends.cpu.memory import scratch
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.row_groups import RowGroups, group_rows
from gpuopt.codecs import Codec, Codecs, Plain
from gpuopt.rules.functions import TYPES
from gpuopt.rules.sources import kernel_root
from gpuopt.rules.update_rule import UpdateRule

Chunk = np.ndarray[Any, Any]
Walk = Literal["chunks", "rows"]
# Takes a table's arrays, values and groups of rows; see `CompiledRows.row_update`.
RowUpdate = Callable[[Sequence[Chunk], Chunk, RowGroups], Callable[[int, int], object]]

_SOURCE = """
{include}
#include "cpu/row_groups.hpp"
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
    const Update::Chunk* chunks, long long num_chunks, long long* taken, const char* joined,
    long long num_joined, const Update::Scalars* scalars) {
  long long alone = 0;
  Update::update_chunks(
      chunks, num_chunks, taken == nullptr ? &alone : taken, joined, num_joined, scalars);
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

extern "C" void update_table(
    void* const* arrays, long long width, const Real* values, const void* indices, int index_bytes,
    long long size, long long first, int bucket_bits, long long* work, long long first_number,
    const Update::Scalars* scalars) {
  const long long most = size + 1;
  long long *positions = work + most, *begins = work + 2 * most, *firsts = work + 3 * most;
  auto* const buckets = reinterpret_cast<std::int32_t*>(work + 4 * most);
  const long long num_rows = gpuopt::group_rows(
      indices, index_bytes, size, first, bucket_bits, buckets, work, positions, begins, firsts);
  Update::update_rows(
      arrays, width, values, work, positions, begins, firsts, 0, num_rows, first_number, *scalars);
}
""",
}

_GROUP_ROWS = """
#include "cpu/row_groups.hpp"

extern "C" long long group_rows(
    const void* indices, int index_bytes, long long size, long long first, int bucket_bits,
    std::int32_t* work, long long* rows, long long* positions, long long* begins,
    long long* firsts) {
  return gpuopt::group_rows(
      indices, index_bytes, size, first, bucket_bits, work, rows, positions, begins, firsts);
}
"""

_INT64 = np.dtype(np.int64)
# Of a sparse gradient: its positions are counted in 32 bits.
MOST_ROWS = 2**31 - 1


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
    """A compiled rule; its calls run without the interpreter's lock.

    Attributes:
        stored: How the arrays that it updates are stored.
    """

    # Of a chunk: short enough that all threads finish at about the same time.
    most_elements = 128 * 1024

    def __init__(
        self, library: ctypes.CDLL, rule: UpdateRule, real: np.dtype[Any], stored: Stored
    ) -> None:
        self._update = library.update_chunks
        self._names = rule.scalars
        self._pack = struct.Struct(f"{len(rule.scalars)}{real.char}").pack
        self.stored = stored

    def pack(self, scalars: Sequence[Scalars]) -> bytes:
        """Returns the scalars of each group, as `update_chunks` takes them."""
        names, pack = self._names, self._pack
        return b"".join([pack(*[each[name] for name in names]) for each in scalars])

    def update_chunks(
        self, table: Table, scalars: bytes, joined: bytes | None = None, taken: Any = None
    ) -> None:
        """Updates chunks until all are taken; threads that call it at once share them.

        Args:
            table: The chunks.
            scalars: From `pack`.
            joined: The gradients that the table's first chunks have no addresses of.
            taken: The address of an int64: how many chunks all callers have taken. None for a call
                that updates all.
        """
        self._update(table.address, table.num_chunks, taken, joined, table.num_joined, scalars)


class Table:
    """Chunks for `CompiledRule.update_chunks`.

    Attributes:
        address: Where they are.
        num_chunks: How many.
        num_joined: So many of them, the first ones, have their gradients side by side.
    """

    def __init__(self, chunks: Chunk, num_joined: int = 0) -> None:
        """Takes chunks, of intp: each row is an `Update::Chunk` of kernels/cpu/update.hpp."""
        self._chunks = chunks
        self.address = address_of(chunks)
        self.num_chunks = ctypes.c_longlong(len(chunks))
        self.num_joined = ctypes.c_longlong(num_joined)


class CompiledForm:
    """A compiled rule with one step's scalars, for arrays of the type that it computes in."""

    scratch_dtypes: tuple[np.dtype[Any], ...] = ()
    most_elements = CompiledRule.most_elements

    def __init__(self, rule: CompiledRule, scalars: Scalars) -> None:
        self._rule = rule
        self._scalars = rule.pack([scalars])

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
        table = Table(np.array([[*addresses, *shape, *firsts, 0]], np.intp))
        self._rule.update_chunks(table, self._scalars)


class CompiledRows:
    """A compiled rule for rows of tables; its calls run without the interpreter's lock.

    Attributes:
        stored: How the arrays that it updates are stored.
    """

    def __init__(
        self, library: ctypes.CDLL, rule: UpdateRule, real: np.dtype[Any], stored: Stored
    ) -> None:
        self._library = library
        self._names, self._real = rule.scalars, real
        self.stored = stored

    def update_table(
        self,
        written: Any,
        width: int,
        first_number: int,
        values: Chunk,
        indices: Chunk,
        scalars: Scalars,
        first: int,
    ) -> None:
        """Updates the rows that a gradient names, each by the sum of its values.

        Args:
            written: `addresses` of the arrays of the variable and its slots, contiguous.
            width: Of a row, in elements.
            first_number: See `Target`.
            values: [num_rows, ...], contiguous, in other memory.
            indices: [num_rows], int32 or int64, within range; at most `MOST_ROWS`.
            scalars: The rule's.
            first: See `compiled_groups`.
        """
        indices = np.require(indices, requirements=["C", "ALIGNED"])
        size = len(indices)
        bucket_bits = bits_of_buckets(size)
        # In int64: four of each row, and what `group_rows` needs in int32.
        num_words = 4 * (size + 1) + ((1 << bucket_bits) + 6 * size + 1) // 2
        [work] = scratch([_INT64], num_words)
        self._library.update_table(
            written,
            ctypes.c_longlong(width),
            address_of(values),
            address_of(indices),
            indices.itemsize,
            ctypes.c_longlong(size),
            ctypes.c_longlong(first),
            ctypes.c_int(bucket_bits),
            address_of(work),
            ctypes.c_longlong(first_number),
            np.array([scalars[name] for name in self._names], self._real).tobytes(),
        )

    def row_update(
        self,
        first_number: int,
        scalars: Scalars,
        written: Sequence[Chunk],
        values: Chunk,
        groups: RowGroups,
    ) -> Callable[[int, int], object]:
        """Returns what updates some of the rows of a table, each by the sum of its values.

        It takes the first of `groups.rows` that is updated, and the one behind the last.

        Args:
            first_number: See `Target`.
            scalars: The rule's.
            written: [height, ...], the arrays of the variable and its slots, contiguous.
            values: [num_rows, ...], contiguous, in other memory.
            groups: From `group_rows`, here or there.
        """
        own = np.array([scalars[name] for name in self._names], self._real)
        given = RowArguments(written, values, groups, first_number, own)
        return partial(given.call, self._library.update_rows)


def compiled_rule(
    rule: UpdateRule, real: np.dtype[Any], stored: Stored | None = None
) -> CompiledRule | None:
    """Returns the compiled form of a rule, for arrays that are `stored` so.

    By default they are of the type that it computes in. There is none without a compiler, or if C++
    cannot update such arrays.
    """
    if why_not_compiled() is not None:
        return None
    stored = stored or stored_plainly(rule, real)
    library = _library(rule, real, stored, "chunks")
    return None if library is None else CompiledRule(library, rule, real, stored)


def compiled_rows(
    rule: UpdateRule, real: np.dtype[Any], stored: Stored | None = None
) -> CompiledRows | None:
    """Returns the compiled form of a rule for rows of a table; see `compiled_rule`.

    The values that are summed are of the type that the rule computes in.
    """
    if why_not_compiled() is not None:
        return None
    stored = stored or stored_plainly(rule, real)
    library = _library(rule, real, stored, "rows")
    return None if library is None else CompiledRows(library, rule, real, stored)


def bits_of_buckets(size: int) -> int:
    """Returns the logarithm of the number of buckets for so many rows: few rows share one."""
    return (4 * size - 1).bit_length()  # a quarter of the buckets is used


def compiled_groups(indices: Chunk, first: int) -> RowGroups:
    """Does what `row_groups.group_rows` does; rows are in the order of their first appearance.

    Args:
        indices: [num_rows], non-negative, int32 or int64.
        first: The sorted position of the least index. `firsts` are right where an index occurs
            three times or more: sums of one or two rows do not depend on them.
    """
    size, library = len(indices), _group_library()
    if library is None or size > MOST_ROWS:
        return group_rows(indices, first)
    indices = np.require(indices, requirements=["C", "ALIGNED"])
    bucket_bits = bits_of_buckets(size)
    [work] = scratch([np.dtype(np.int32)], (1 << bucket_bits) + 6 * size)
    rows, positions, begins, firsts = np.empty((4, size + 1), np.int64)
    num_rows = library.group_rows(
        address_of(indices),
        indices.itemsize,
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
        library.group_rows.restype = ctypes.c_longlong
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
        real=TYPES[real.name],
        codecs=stored.cpp,
    )
    name = f"{rule.name}-{real if is_plain else 'stored'}-{walk}"
    library = build(name, source + _WALKS[walk], rule.include_folders)
    if library is not None:
        getattr(library, f"update_{walk}").restype = None
        if walk == "rows":
            library.update_table.restype = None
    return library


class RowArguments:
    """Arguments of the C++ functions that update rows; see `CompiledRows.row_update`.

    numpy takes longer to return an array's address than C++ to update some rows, so each address is
    read once. A thread that has not ended yet keeps the arrays.
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
    """Returns the addresses of arrays, as C++ takes them."""
    return (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])


def address_of(array: Chunk) -> ctypes.c_void_p:
    """Returns the address of an array, as C++ takes it."""
    return ctypes.c_void_p(array.ctypes.data)
