"""float8 e4m3 with a scale for each block: a codec that gpuopt does not have, in one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpuopt.codecs import Coded
from gpuopt.state.slot_codecs import CODED_FORMS, CodedForm

Array = np.ndarray[Any, Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = np.float32(448)
_CPP = """\
#include "shared/slot_codes.cuh"
#ifndef GPUOPT_FLOAT8
#define GPUOPT_FLOAT8
namespace gpuopt {
struct Float8Code : BlockCode {
  GPUOPT_INLINE static float scale(float largest) { return largest / 448; }
  GPUOPT_INLINE static float decode(int code, float scale) {
    const int magnitude = code & 0x7f;
    const unsigned int bits = static_cast<unsigned int>(magnitude + (120 << 3)) << 20;
    float value;
    memcpy(&value, &bits, sizeof value);
    if (magnitude < 8) value = static_cast<float>(magnitude) * 0x1p-9f;
    return (code < 0x80 ? value : -value) * scale;
  }
  GPUOPT_INLINE static int encode(float magnitude, bool is_below_0) {
    const bool is_normal = magnitude >= 0x1p-6f;
    // Next to 2^14, a float is a multiple of the least float8.
    const float number = is_normal ? magnitude : magnitude + 0x1p14f;
    int bits;
    memcpy(&bits, &number, sizeof bits);
    const int nearest = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    const int code = is_normal ? nearest - (120 << 3) : bits - 0x46800000;
    return is_below_0 ? code | 0x80 : code;
  }
};
}
#endif"""


@dataclass(frozen=True)
class Float8(Coded):
    """The largest magnitude of a block becomes 448, the largest float8."""

    per_block: int = 256
    name = "float8_e4m3fn"
    map = "float8_e4m3fn"
    cpp_code = "gpuopt::Float8Code"
    definitions = (_CPP,)

    def encode_blocks(self, values: Array) -> tuple[Array, Array]:
        magnitudes = np.abs(values)
        scales = magnitudes.max(axis=1) / _LARGEST
        magnitudes /= np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
        codes = magnitudes.astype(_E4M3).view(np.uint8)
        return np.where(values < 0, codes | np.uint8(0x80), codes), scales

    def decode_blocks(self, codes: Array, scales: Array) -> Array:
        return np.asarray(codes.view(_E4M3).astype(np.float32) * scales[:, np.newaxis])


def register(patch: pytest.MonkeyPatch, per_block: int = 256) -> dict[str, Any]:
    """Adds the codec to the table; returns the options that ask for it."""
    form = CodedForm(Float8(per_block), Float8(per_block))
    patch.setitem(CODED_FORMS, "float8", form)
    return {"slot_bits": 8, "slot_form": "float8"}
