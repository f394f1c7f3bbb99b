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

// Magnitudes are looked up by exponent and seven digits. Below the first, all are nearest to 0.
constexpr int code_shift = 16;
constexpr int num_places = (23 << 7) + 1;
constexpr unsigned int first_bits = (127 - 23) << 23;
constexpr int signed_zero = 127;

// Mirrors `SlotTables` in gpuopt/rules/slot_codes.py: the number of each code, and for each place
// what is added to a magnitude's bits so that those from `code_shift` on are its code.
struct SlotTables {
  float values[256];
  unsigned int steps[num_places];
};

// For each of the two maps: that of both signs, and the other one.
GPUOPT_INLINE constexpr int map_of(int coding) { return coding == coding_signed ? 0 : 1; }

GPUOPT_INLINE float decode(int coding, const SlotTables& tables, int code, float scale) {
  const float value = tables.values[code] * scale;
  return coding == coding_roots ? value * value : value;
}

// Returns what is stored of a slot's number, before it is divided by the block's scale. Of what is
// not finite, it is not, either.
GPUOPT_INLINE float to_store(int coding, float value) {
  if (coding == coding_signed) return value;
  const float stored = coding == coding_roots ? square_root(value) : value;
  int bits;
  memcpy(&bits, &value, sizeof bits);
  constexpr int bits_of_minus_infinity = -(1 << 23);
  return bits < bits_of_minus_infinity ? 0 : stored;  // 0 of finite numbers below 0, and of -0
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

GPUOPT_INLINE unsigned int upper_half(unsigned int bits) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(bits, 0, 0x4432);  // one instruction less than the shift for an address
#else
  return bits >> 16;
#endif
}

// Returns the code of a magnitude of at most 1, with the sign of the number, in the eight bits from
// `code_shift` on; below them are others.
GPUOPT_INLINE int code_of(int coding, const SlotTables& tables, float magnitude, bool is_below_0) {
  unsigned int bits;
  memcpy(&bits, &magnitude, sizeof bits);
  bits = bits > first_bits ? bits : first_bits;
  const int place = static_cast<int>(upper_half(bits)) - static_cast<int>(first_bits >> 16);
  const int code = static_cast<int>(bits + tables.steps[place]);
  if (coding != coding_signed || !is_below_0) return code;
  constexpr int one = 1 << code_shift;
  const int below = 2 * signed_zero * one + (one - 1) - code;
  return below > 0 ? below : 0;  // there is no -1
}

// Whether a number is neither infinite nor NaN.
GPUOPT_INLINE bool is_finite(float value) { return value - value == 0; }

}  // namespace gpuopt
