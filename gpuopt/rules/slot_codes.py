"""Slots in 8 bits: the maps from codes to numbers, and blocks of codes with a scale for each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# How many codes share a scale, in the forms of bitsandbytes' map.
BLOCK = 256
# The suffix of the name of a slot's scales in states; its codes have the slot's own name.
SCALES = "_absmax"

# Magnitudes are looked up by the upper 16 of float32's bits: exponent and seven digits. All below
# `_FIRST_BITS` are nearest to 0.
_CODE_SHIFT = np.uint32(16)
_FIRST_BITS = np.uint32((127 - 23) << 23)
_NUM_PLACES = (23 << 7) + 1
_DECADES = 7


class Coding(IntEnum):
    """The meaning of a slot's codes.

    Attributes:
        SIGNED: Numbers of both signs.
        SQUARES: Numbers that are not below 0.
        ROOTS: Their square roots.
    """

    SIGNED = 0
    SQUARES = 1
    ROOTS = 2

    @property
    def zero(self) -> int:
        """The code of 0."""
        return 127 if self is Coding.SIGNED else 0

    @property
    def magnitudes(self) -> Array:
        """The numbers that are not below 0, float32, ascending from 0 to 1."""
        return _magnitudes(self is Coding.SIGNED)

    @property
    def bounds(self) -> Array:
        """Between neighbours of `magnitudes`: up to and with a bound, the lower one is nearer."""
        return (self.magnitudes[:-1] + self.magnitudes[1:]) / np.float32(2)

    @property
    def values(self) -> Array:
        """The number of each of the 256 codes, float32: bitsandbytes' `create_dynamic_map`."""
        magnitudes = self.magnitudes
        if self is not Coding.SIGNED:
            return magnitudes
        # There is no -1.
        return np.concatenate([-magnitudes[-2:0:-1], magnitudes])


class CodedValues(NamedTuple):
    """Numbers in 8 bits.

    Attributes:
        codes: uint8, of the numbers' shape.
        scales: float32: the largest magnitude of each block of codes, in C order: [num_blocks].
            Where blocks end at rows, [num_rows, blocks of a row].
    """

    codes: Array
    scales: Array


def scales_name(slot_name: str) -> str:
    """Returns the name that state has for the scales of a slot."""
    return f"{slot_name}{SCALES}"


def scales_shape(shape: Sequence[int], per_block: int, *, by_rows: bool) -> tuple[int, ...]:
    """Returns the shape of the scales of a slot of `shape`; see `CodedValues`."""
    size = int(np.prod(shape, dtype=np.int64))
    if not by_rows:
        return (-(-size // per_block),)
    width = int(np.prod(shape[1:], dtype=np.int64))
    return shape[0], -(-width // per_block)


class Blocks(NamedTuple):
    """Blocks of equal length, at the same places of several arrays.

    Attributes:
        arrays: Views [num_blocks, length].
        scales: Views [num_blocks].
    """

    arrays: list[Array]
    scales: list[Array]


def blocks_of(arrays: Sequence[Array], scales: Sequence[Array], per_block: int) -> list[Blocks]:
    """Views arrays of one shape as blocks; those of one length are together.

    Args:
        arrays: Contiguous.
        scales: Of some of them, all of one shape; see `CodedValues`.
        per_block: How many codes share a scale.
    """
    if not arrays[0].size:
        return []
    if scales[0].ndim == 1:
        flat = [array.reshape(-1) for array in arrays]
        count = flat[0].size // per_block
        end = count * per_block
        blocks = [array[:end].reshape(count, per_block) for array in flat]
        whole = blocks, [s[:count] for s in scales]
        last = [array[end:].reshape(1, -1) for array in flat], [s[count:] for s in scales]
        return [Blocks(*each) for each in (whole, last) if each[0][0].size]
    rows = [array.reshape(len(array), -1) for array in arrays]
    return [
        Blocks(
            [array[:, number * per_block : (number + 1) * per_block] for array in rows],
            [each[:, number] for each in scales],
        )
        for number in range(scales[0].shape[1])
    ]


def encode(values: Array, coding: Coding) -> tuple[Array, Array]:
    """Returns the codes [num_blocks, length] and scales [num_blocks] of blocks of finite numbers.

    Args:
        values: float32 [num_blocks, length].
        coding: The meaning of the codes.
    """
    if coding is not Coding.SIGNED:
        values = np.maximum(values, np.float32(0))
    if coding is Coding.ROOTS:
        values = np.sqrt(values)
    magnitudes = np.abs(values)
    scales = magnitudes.max(axis=1)
    # Zeros are 0 by any scale.
    magnitudes /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
    bits = np.maximum(magnitudes.view(np.uint32), _FIRST_BITS)
    bits += SlotTables.of(coding).steps.take((bits - _FIRST_BITS) >> _CODE_SHIFT)
    codes = (bits >> _CODE_SHIFT).astype(np.uint8)
    if coding is Coding.SIGNED:
        zero = np.uint8(coding.zero)
        codes = np.where(values < 0, zero - np.minimum(codes - zero, zero), codes)
    return codes, scales


def decode(codes: Array, scales: Array, coding: Coding) -> Array:
    """Returns the numbers of blocks of codes, float32; see `encode`."""
    values: Array = SlotTables.of(coding).values.take(codes) * scales[:, np.newaxis]
    return values * values if coding is Coding.ROOTS else values


class SlotTables(NamedTuple):
    """The tables for encoding and decoding: `SlotTables` in kernels/shared/slot_codes.cuh.

    Attributes:
        values: float32 [256], of each code.
        steps: uint32 [_NUM_PLACES]: for the first digits of a magnitude, what is added to its bits
            so that the upper 16 are its code: by a carry, one more above the bound in a place.
    """

    values: Array
    steps: Array

    @staticmethod
    @cache
    def of(coding: Coding) -> SlotTables:
        places = np.arange(_NUM_PLACES, dtype=np.uint32) << _CODE_SHIFT
        lowest = places + _FIRST_BITS
        # Of a place, the code of the lowest magnitude, and the highest one of that code.
        codes = np.searchsorted(coding.bounds, lowest.view(np.float32)).astype(np.uint32)
        codes[0] = 0
        bounds = np.append(coding.bounds, np.float32(np.inf)).view(np.uint32)[codes]
        highest = np.minimum(bounds, lowest | np.uint32(0xFFFF))
        steps = (codes + np.uint32(coding.zero) << _CODE_SHIFT) + np.uint32(0xFFFF) - highest
        return SlotTables(coding.values, steps)

    def cpp(self, name: str) -> str:
        """Returns C++ that defines these as a constant of namespace gpuopt."""
        values = ",".join(f"{value.hex()}f" for value in self.values.tolist())
        steps = ",".join(f"{step}u" for step in self.steps.tolist())
        constant = f"GPUOPT_CONSTANT SlotTables {name} = {{{{{values}}}, {{{steps}}}}};"
        return f'#include "shared/slot_codes.cuh"\nnamespace gpuopt {{ {constant} }}'


@cache
def _magnitudes(is_signed: bool) -> Array:
    """Returns the published map: in each decade twice as many numbers, the middles of intervals."""
    decades = [np.zeros(1, np.float32)]
    for decade in range(_DECADES):
        count = 2 ** (decade + (0 if is_signed else 1))
        step = float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        # From both ends, and rounded once, as torch's linspace does.
        numbers = np.arange(count + 1)
        up, down = float(np.float32(0.1)) + step * numbers, 1 - step * (count - numbers)
        edges = np.where(numbers < (count + 1) // 2, up, down).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        decades.append(np.float32(10.0 ** (decade + 1 - _DECADES)) * middles)
    decades.append(np.ones(1, np.float32))
    magnitudes = np.concatenate(decades)
    magnitudes.flags.writeable = False
    return magnitudes
