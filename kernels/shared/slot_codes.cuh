// Slots in 8 bits: what the codes of a slot stand for, and how a number finds its code.
// Mirrors gpuopt/rules/slot_codes.py, to the bit. Compiles as CUDA and as plain C++17.
#pragma once
#include "element.cuh"
#include "math.cuh"

#if !defined(__CUDACC__)
#include <cstring>
#endif

namespace gpuopt {

// How many codes share a scale.
constexpr int block_codes = 256;

// What the codes of a slot stand for: numbers of both signs, squares, or the roots of squares.
enum coding { coding_signed = 0, coding_squares = 1, coding_roots = 2 };

// The codings of a rule's coded slots as one number: that of the k-th are the two bits from 2 * k
// on.
GPUOPT_INLINE constexpr int coding_of(int codings, int slot) { return codings >> 2 * slot & 3; }

// Numbers are looked up by exponent and seven digits. Below the first place, all are nearest to 0.
constexpr int dropped_bits = 16;
constexpr int first_place = (127 - 23) << 7;
constexpr int num_places = (127 << 7) - first_place + 1;
constexpr int signed_zero = 127;

// Mirrors `SlotTables` in gpuopt/rules/slot_codes.py.
struct SlotTables {
  float values[256];
  float bounds[256];
  unsigned char first[(num_places + 3) / 4 * 4];
};

// For each of the two maps: that of both signs, and the other one.
GPUOPT_INLINE constexpr int map_of(int coding) { return coding == coding_signed ? 0 : 1; }

GPUOPT_INLINE float decode(int coding, const SlotTables& tables, unsigned char code, float scale) {
  const float value = tables.values[code] * scale;
  return coding == coding_roots ? value * value : value;
}

// Returns what is stored of a slot's number, before it is divided by the block's scale.
GPUOPT_INLINE float to_store(int coding, float value) {
  if (coding == coding_signed) return value;
  const float stored = coding == coding_roots ? square_root(value) : value;
  return value > 0 ? stored : 0;
}

// Divides numbers of a block, which are not above its scale, by the scale. Quotients from 2^-24 on
// have the bits of a division: for one correction of what is within a unit in the last place, see
// P. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor (1990).
struct BlockDivisor {
  float shift;  // a power of 2: the divisor is in [2, 4), or a subnormal one's below, and nothing
                // underflows
  float divisor;
  float reciprocal;
  float rest;  // what the reciprocal lacks

  GPUOPT_INLINE explicit BlockDivisor(float scale) {
    unsigned int bits;
    memcpy(&bits, &scale, sizeof bits);
    const unsigned int exponent = bits >> 23;
    bits = (exponent > 0 ? 255 - exponent : 254) << 23;
    memcpy(&shift, &bits, sizeof shift);
    divisor = scale * shift;
    reciprocal = 1 / divisor;
    rest = fused(-reciprocal, divisor, 1.0f) * reciprocal;
  }

  GPUOPT_INLINE float quotient(float number) const {
    const float shifted = number * shift;
    const float near = fused(shifted, reciprocal, shifted * rest);
    return fused(fused(-near, divisor, shifted), reciprocal, near);
  }
};

// Returns the place of a magnitude of at most 1 in `SlotTables::first`.
GPUOPT_INLINE int place_of(float magnitude) {
  unsigned int bits;
  memcpy(&bits, &magnitude, sizeof bits);
  const int place = static_cast<int>(bits >> dropped_bits) - first_place;
  return place > 0 ? place : 0;
}

// Returns the code of a magnitude, given what `first` has at its place.
GPUOPT_INLINE int code_of(int coding, const SlotTables& tables, int first, float magnitude,
                          bool is_below_0) {
  const int code = first + (magnitude > tables.bounds[first]);
  if (coding != coding_signed) return code;
  if (!is_below_0) return signed_zero + code;
  return code < signed_zero ? signed_zero - code : 0;  // there is no -1
}

// Whether a number is neither infinite nor NaN.
GPUOPT_INLINE bool is_finite(float value) { return value - value == 0; }

}  // namespace gpuopt
