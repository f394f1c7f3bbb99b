"""Codecs: how the numbers of a variable, a gradient or a slot are stored in arrays.

A rule computes in float32 or float64 and does not depend on codecs, nor codecs on rules. Each codec
is a class in numpy here and one in C++ in kernels/cpu/codecs.hpp; both write the same bits. Kernels
for GPUs are compiled for types, which `storage_of` in backends/cuda/mixed.py takes from codecs: one
type for all slots but an average.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from gpuopt.computed_once import computed_once
from gpuopt.rules.functions import TYPES
from gpuopt.rules.rounded import BFLOAT16
from gpuopt.rules.slot_codes import (
    BLOCK,
    CodedValues,
    Coding,
    SlotTables,
    blocks_of,
    decode,
    encode,
    scales_shape,
)
from gpuopt.rules.split import joined, split

Array = np.ndarray[Any, Any]

_FLOAT: np.dtype[Any] = np.dtype(np.float32)
_HALVES = {
    BFLOAT16: "gpuopt::Bfloat16",
    np.dtype(np.float16): "gpuopt::Float16",
}


class Form(NamedTuple):
    """The form of a new array.

    Attributes:
        shape: The array's.
        dtype: The array's.
        start: The initial value of each element.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: float


class Codec(ABC):
    """How numbers are stored.

    Attributes:
        real: The type of the numbers.
        num_arrays: How many arrays store the numbers.
        is_decoded: Whether `decode` computes the numbers. Else the first array holds them, and
            rules read and write them there.
        per_block: How many elements of the first array share a number of the second, their scale; 0
            if there are no blocks.
        is_rounded: Whether a rule with stochastic rounding rounds the numbers at random.
    """

    real: np.dtype[Any] = _FLOAT
    num_arrays: int = 1
    is_decoded: bool = False
    per_block: int = 0
    is_rounded: bool = False

    @property
    @abstractmethod
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The type of each array."""

    @property
    @abstractmethod
    def cpp(self) -> str | None:
        """The codec's name in C++; None if it is in numpy alone."""

    @property
    def definitions(self) -> tuple[str, ...]:
        """C++ that a translation unit needs before it names the codec, with its own includes."""
        return ()

    @property
    def gradient_dtype(self) -> np.dtype[Any]:
        """The dtype of the gradients of a variable that is stored so."""
        return self.dtypes[0]

    def as_stored(self, values: Array) -> Array:
        """Returns a variable's numbers as they are once stored: averages follow these."""
        return values

    def decode(self, arrays: Sequence[Array], out: Array) -> None:
        """Writes the stored numbers to `out`, which is flat, if `is_decoded`."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, values: Array, arrays: Sequence[Array]) -> None:
        """Stores flat numbers.

        A codec whose numbers are updated in place writes only its other arrays.
        """

    def forms(self, shape: tuple[int, ...], start: float = 0.0) -> list[Form]:
        """Returns the forms of new arrays for the numbers of a slot.

        Args:
            shape: That of the numbers.
            start: The initial value.
        """
        raise NotImplementedError

    def new_arrays(self, values: Array) -> Sequence[Array]:
        """Returns new arrays that store numbers."""
        arrays = [np.empty(form.shape, form.dtype) for form in self.forms(values.shape)]
        if not self.is_decoded:
            np.copyto(arrays[0], values, casting="unsafe")
        self.encode(values, arrays)
        return arrays

    def numbers(self, arrays: Sequence[Array]) -> Array:
        """Returns the numbers that arrays store, in the shape of the first one."""
        if not self.is_decoded:
            return arrays[0]
        values = np.empty(arrays[0].size, self.real)
        self.decode(arrays, values)
        return values.reshape(arrays[0].shape)


@dataclass(frozen=True)
class Plain(Codec):
    """An array of numbers as rules compute with them."""

    real: np.dtype[Any]

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return (self.real,)

    @property
    def cpp(self) -> str | None:
        return f"gpuopt::Plain<{TYPES[self.real.name]}>"

    def encode(self, values: Array, arrays: Sequence[Array]) -> None:
        pass

    def forms(self, shape: tuple[int, ...], start: float = 0.0) -> list[Form]:
        return [Form(shape, self.real, start)]


@dataclass(frozen=True)
class Cast(Codec):
    """An array of another type; numbers are rounded to nearest."""

    stored: np.dtype[Any]
    real: np.dtype[Any]
    is_decoded = True

    @property
    def is_rounded(self) -> bool:  # type: ignore[override]
        return bool(self.stored == BFLOAT16)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return (self.stored,)

    @property
    def cpp(self) -> str | None:
        stored = _HALVES.get(self.stored) if self.real == _FLOAT else None
        return stored and f"gpuopt::Cast<{stored}>"

    def as_stored(self, values: Array) -> Array:
        return values.astype(self.stored).astype(values.dtype)

    def decode(self, arrays: Sequence[Array], out: Array) -> None:
        np.copyto(out, arrays[0].reshape(-1), casting="unsafe")

    def encode(self, values: Array, arrays: Sequence[Array]) -> None:
        np.copyto(arrays[0], values.reshape(arrays[0].shape), casting="unsafe")

    def forms(self, shape: tuple[int, ...], start: float = 0.0) -> list[Form]:
        return [Form(shape, self.stored, start)]


@dataclass(frozen=True)
class MasterAndCopy(Codec):
    """Master copies of weights, and the weights in 16 bits, which are written and never read."""

    copy: np.dtype[Any]
    num_arrays = 2

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return _FLOAT, self.copy

    @property
    def cpp(self) -> str | None:
        return f"gpuopt::MasterAndCopy<{_HALVES[self.copy]}>"

    @property
    def gradient_dtype(self) -> np.dtype[Any]:
        return self.copy

    def encode(self, values: Array, arrays: Sequence[Array]) -> None:
        np.copyto(arrays[1], arrays[0], casting="unsafe")


@dataclass(frozen=True)
class Split(Codec):
    """Master copies in two halves: weights in bfloat16, and the lower bits in uint16."""

    num_arrays = 2
    is_decoded = True
    dtypes = BFLOAT16, np.dtype(np.uint16)

    @property
    def cpp(self) -> str | None:
        return "gpuopt::Split"

    def decode(self, arrays: Sequence[Array], out: Array) -> None:
        out[:] = joined(*arrays).reshape(-1)

    def encode(self, values: Array, arrays: Sequence[Array]) -> None:
        for array, half in zip(arrays, split(values), strict=True):
            array[...] = half.reshape(array.shape)


class Coded(Codec):
    """Codes in 8 bits, and the scale of each block of them; see `CodedValues`.

    Attributes:
        ends_at_rows: Whether blocks may end at rows, as those that sparse gradients update do.
    """

    num_arrays = 2
    ends_at_rows: bool = True
    is_decoded = True
    per_block = BLOCK
    dtypes = np.dtype(np.uint8), _FLOAT

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the meaning of codes in saved states."""

    @property
    @abstractmethod
    def map(self) -> str:
        """The map from codes to numbers, as saved states name it."""

    @property
    @abstractmethod
    def cpp_code(self) -> str:
        """The C++ struct that encodes and decodes one number, as `ByteCode` in slot_codes.cuh."""

    @property
    def cpp(self) -> str | None:
        return f"gpuopt::Coded<{self.cpp_code}, {self.per_block}>"

    @property
    def meaning(self) -> str:
        """The meaning of codes, for people."""
        return "each number"

    @abstractmethod
    def encode_blocks(self, values: Array) -> tuple[Array, Array]:
        """Returns the codes [num_blocks, length] and scales [num_blocks] of blocks.

        Args:
            values: float32 [num_blocks, length], all finite.
        """

    @abstractmethod
    def decode_blocks(self, codes: Array, scales: Array) -> Array:
        """Returns the numbers of blocks, float32 [num_blocks, length]; see `encode_blocks`."""

    def decode(self, arrays: Sequence[Array], out: Array) -> None:
        codes, scales = arrays
        values = out.reshape(codes.shape)
        for (numbers, block), [theirs] in blocks_of([values, codes], [scales], self.per_block):
            numbers[...] = self.decode_blocks(block, theirs)

    def encode(self, values: Array, arrays: Sequence[Array]) -> None:
        codes, scales = arrays
        numbers = values.reshape(codes.shape)
        for (block, new_codes), [new_scales] in blocks_of(
            [numbers, codes], [scales], self.per_block
        ):
            new_codes[...], new_scales[...] = self.encode_blocks(block)

    def forms(
        self, shape: tuple[int, ...], start: float = 0.0, *, by_rows: bool = False
    ) -> list[Form]:
        """Returns the forms of new codes and scales; see `Codec.forms`.

        Args:
            shape: That of the numbers.
            start: The initial value.
            by_rows: Whether blocks end at rows.
        """
        of_scales = scales_shape(shape, self.per_block, by_rows=by_rows)
        of_codes, real = self.dtypes
        [[code]], [scale] = self.encode_blocks(np.full((1, 1), start, real))
        return [Form(shape, of_codes, float(code)), Form(of_scales, real, float(scale))]

    def new_arrays(self, values: Array, *, by_rows: bool = False) -> CodedValues:
        """Returns the nearest codes and their scales; numbers that are not finite become 0.

        Args:
            values: The numbers.
            by_rows: See `forms`.
        """
        stored = np.array(values, np.float32)
        stored[~np.isfinite(stored)] = 0
        forms = self.forms(values.shape, by_rows=by_rows)
        arrays = CodedValues(*[np.empty(form.shape, form.dtype) for form in forms])
        self.encode(stored, arrays)
        return arrays


@dataclass(frozen=True)
class Byte(Coded):
    """Codes of bitsandbytes' dynamic map.

    Attributes:
        coding: The meaning of the codes.
    """

    coding: Coding
    ends_at_rows: bool = True
    map = "dynamic"

    @property
    def name(self) -> str:
        return self.coding.name.lower()

    @property
    def meaning(self) -> str:
        return "the root of each number" if self.coding is Coding.ROOTS else "each number"

    @property
    def cpp_code(self) -> str:
        return f"gpuopt::ByteCode<{int(self.coding)}, gpuopt::{self._tables}>"

    @property
    def definitions(self) -> tuple[str, ...]:
        return (SlotTables.of(self.coding).cpp(self._tables),)

    @property
    def _tables(self) -> str:
        return "signed_tables" if self.coding is Coding.SIGNED else "unsigned_tables"

    def encode_blocks(self, values: Array) -> tuple[Array, Array]:
        return encode(values, self.coding)

    def decode_blocks(self, codes: Array, scales: Array) -> Array:
        return decode(codes, scales, self.coding)


def codec_of(dtype: np.dtype[Any], real: np.dtype[Any]) -> Plain | Cast:
    """Returns the codec of an array of any real type, where rules compute in `real`."""
    return Plain(real) if dtype == real else Cast(dtype, real)


@dataclass(frozen=True)
class Codecs:
    """The codecs of a variable and its slots.

    Methods take all arrays in one list: those of the variable, then those of each slot.
    """

    var: Codec
    slots: tuple[Codec, ...]

    @computed_once
    def every(self) -> list[Codec]:
        """The variable's codec, then one for each slot."""
        return [self.var, *self.slots]

    @computed_once
    def are_plain(self) -> bool:
        """Whether all arrays are of the type that rules compute in."""
        return {type(each) for each in self.every} == {Plain}

    @computed_once
    def are_casts(self) -> bool:
        """Whether the variable and each slot is one array, with one number for each element."""
        return {type(each) for each in self.every} <= {Plain, Cast}

    @computed_once
    def per_block(self) -> int:
        """The block size of the slots in 8 bits, which is the same for all; 0 if there are none."""
        return max(codec.per_block for codec in self.every)

    @computed_once
    def coded(self) -> tuple[Coded, ...]:
        """The codecs of slots in 8 bits."""
        return tuple(codec for codec in self.slots if isinstance(codec, Coded))

    @computed_once
    def num_decoded(self) -> int:
        """How many buffers `decode` needs."""
        return sum(map(attrgetter("is_decoded"), self.every))

    def decode(self, arrays: Sequence[Array], buffers: Sequence[Array]) -> list[Array]:
        """Returns the numbers of the variable and of each slot, flat.

        Args:
            arrays: Contiguous.
            buffers: One for each decoded codec, at least as long as the variable.
        """
        if self.are_plain:
            return [array.reshape(-1) for array in arrays]
        left = iter(buffers)
        values = []
        for codec, stored in zip(self.every, self._divided(arrays), strict=True):
            if codec.is_decoded:
                out = next(left)[: stored[0].size]
                codec.decode(stored, out)
                values.append(out)
            else:
                values.append(stored[0].reshape(-1))
        return values

    def encode(self, values: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Stores the updated numbers that `decode` returned."""
        if self.are_plain:
            return
        coded = [each for codec, each in zip(self.every, values, strict=True) if codec.per_block]
        if coded:
            # Infinity and NaN have no code: then all coded slots of the element start again from 0.
            lost = ~np.logical_and.reduce([np.isfinite(each) for each in coded])
            for each in coded:
                each[lost] = 0
        for codec, each, stored in zip(self.every, values, self._divided(arrays), strict=True):
            codec.encode(each, stored)

    def _divided(self, arrays: Sequence[Array]) -> list[Sequence[Array]]:
        """Returns the arrays of each codec."""
        divided, first = [], 0
        for codec in self.every:
            divided.append(arrays[first : first + codec.num_arrays])
            first += codec.num_arrays
        return divided
