// Slots in 8 bits: the numbers of codes, and the code of a number.
// Mirrors gpuopt/rules/slot_codes.py, to the bit. Compiles as CUDA and as plain C++17.
#pragma once
#include "constants.cuh"
#include "element.cuh"
#include "math.cuh"

#if defined(__CUDACC__)
#define GPUOPT_CONSTANT __device__ const
#else
#include <cstring>
#define GPUOPT_CONSTANT static const
#endif

namespace gpuopt {

// Magnitudes are looked up by their upper 16 bits: exponent and seven digits. All below
// `first_bits` are nearest to 0.
constexpr int num_places = (23 << 7) + 1;
constexpr unsigned int first_bits = (127 - 23) << 23;
constexpr int signed_zero = 127;

// The tables of a map: the number of each code, and for each place the step that is added to a
// magnitude's bits, so that their third byte is its code. `SlotTables` in
// gpuopt/rules/slot_codes.py writes the constants of this type that a program needs.
struct SlotTables {
  float values[256];
  unsigned int steps[num_places];
};

// The tables that a loop reads: the constant itself, or a copy that `prepare_tables` makes.
// codecs.hpp and coded_blocks.cuh define both functions.
template <const SlotTables& tables>
GPUOPT_INLINE const SlotTables& looked_up();
template <const SlotTables& tables>
GPUOPT_INLINE void prepare_tables();

// Divides numbers of a block by its scale. Quotients from 2^-24 to 2^24 have the bits of a
// division: for one correction of what is within a unit in the last place, see P. Markstein,
// Computation of elementary functions on the IBM RISC System/6000 processor (1990).
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

// Each codec of blocks has a struct that is derived from this one, and defines
//   float decode(int code, float scale)            the number of a code, given its block's scale;
//   int encode(float magnitude, bool is_below_0)   the code of a number, given whether it is below
//                                                  0, and its magnitude divided by the scale.
struct BlockCode {
  // Whether stored numbers may be below 0.
  static constexpr bool has_sign = true;
  // Which byte of what `encode` returns is the code, 0 for the lowest; others have no meaning.
  static constexpr int byte_of_code = 0;

  // Prepares the tables that it needs.
  GPUOPT_INLINE static void prepare() {}
  // What is stored of a slot's number; it is not finite if the number is not.
  GPUOPT_INLINE static float to_store(float value) { return value; }
  // A block's scale, given the largest magnitude that is stored: from 0 on, and such that no
  // magnitude is more than 2^24 times the scale.
  GPUOPT_INLINE static float scale(float largest) { return largest; }
};

// The codes of one map: of numbers of both signs, or of the others.
template <int coding, const SlotTables& tables>
struct ByteCode : BlockCode {
  static constexpr bool has_sign = coding == coding_signed;
  static constexpr int byte_of_code = 2;

  GPUOPT_INLINE static void prepare() { prepare_tables<tables>(); }

  GPUOPT_INLINE static float decode(int code, float scale) {
    const float value = looked_up<tables>().values[code] * scale;
    return coding == coding_roots ? value * value : value;
  }

  GPUOPT_INLINE static float to_store(float value) {
    if (has_sign) return value;
    const float stored = coding == coding_roots ? square_root(value) : value;
    int bits;
    memcpy(&bits, &value, sizeof bits);
    constexpr int bits_of_minus_infinity = -(1 << 23);
    return bits < bits_of_minus_infinity ? 0 : stored;  // 0 of finite numbers below 0, and of -0
  }

  GPUOPT_INLINE static int encode(float magnitude, bool is_below_0) {
    unsigned int bits;
    memcpy(&bits, &magnitude, sizeof bits);
    bits = bits > first_bits ? bits : first_bits;
    const int place = static_cast<int>(upper_half(bits)) - static_cast<int>(first_bits >> 16);
    const int code = static_cast<int>(bits + looked_up<tables>().steps[place]);
    if (!has_sign || !is_below_0) return code;
    constexpr int one = 1 << 8 * byte_of_code;
    const int below = 2 * signed_zero * one + (one - 1) - code;
    return below > 0 ? below : 0;  // there is no -1
  }
};

// The structs of a rule's coded slots, each called by the slot's number: a constant, once loops are
// unrolled.
template <class Code, class... Others>
struct CodesOf {
  GPUOPT_INLINE static void prepare() {
    Code::prepare();
    CodesOf<Others...>::prepare();
  }
  GPUOPT_INLINE static bool has_sign(int slot) {
    return slot == 0 ? Code::has_sign : CodesOf<Others...>::has_sign(slot - 1);
  }
  GPUOPT_INLINE static float decode(int slot, int code, float scale) {
    return slot == 0 ? Code::decode(code, scale)
                     : CodesOf<Others...>::decode(slot - 1, code, scale);
  }
  GPUOPT_INLINE static float to_store(int slot, float value) {
    return slot == 0 ? Code::to_store(value) : CodesOf<Others...>::to_store(slot - 1, value);
  }
  GPUOPT_INLINE static float scale(int slot, float largest) {
    return slot == 0 ? Code::scale(largest) : CodesOf<Others...>::scale(slot - 1, largest);
  }
  GPUOPT_INLINE static int encode(int slot, float magnitude, bool is_below_0) {
    return slot == 0 ? Code::encode(magnitude, is_below_0)
                     : CodesOf<Others...>::encode(slot - 1, magnitude, is_below_0);
  }
  GPUOPT_INLINE static int byte_of_code(int slot) {
    return slot == 0 ? Code::byte_of_code : CodesOf<Others...>::byte_of_code(slot - 1);
  }
};
template <class Code>
struct CodesOf<Code> {
  GPUOPT_INLINE static void prepare() { Code::prepare(); }
  GPUOPT_INLINE static bool has_sign(int) { return Code::has_sign; }
  GPUOPT_INLINE static float decode(int, int code, float scale) {
    return Code::decode(code, scale);
  }
  GPUOPT_INLINE static float to_store(int, float value) { return Code::to_store(value); }
  GPUOPT_INLINE static float scale(int, float largest) { return Code::scale(largest); }
  GPUOPT_INLINE static int encode(int, float magnitude, bool is_below_0) {
    return Code::encode(magnitude, is_below_0);
  }
  GPUOPT_INLINE static int byte_of_code(int) { return Code::byte_of_code; }
};

// Whether a number is neither infinite nor NaN.
GPUOPT_INLINE bool is_finite(float value) { return value - value == 0; }

}  // namespace gpuopt
