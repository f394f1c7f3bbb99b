// How the arrays of an update are stored in host memory. A codec reads numbers as rules
// compute with them, and writes them back; rules and codecs do not depend on each other.
// Twins of gpuopt/codecs.py, to the bit.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../shared/slot_codes.cuh"
#include "../shared/split.cuh"

// Each iteration has an element of its own, so that several may run in one instruction. What is
// left of the last such instruction stays a loop: unrolled, it takes GCC as long as all else.
#if defined(__clang__)
#define GPUOPT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GPUOPT_INDEPENDENT _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#endif

namespace gpuopt {

// Where elements begin in their arrays: in elements, and in blocks of codes.
struct Place {
  long long element;
  long long block;
};

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

// The conversions have no branches, and integers alone where numbers may be subnormal: so loops
// over them use vectors and never trap.

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widened(Bfloat16 stored) {
  return float_of(static_cast<std::uint32_t>(stored.bits) << 16);
}

inline float widened(Float16 stored) {
  const std::uint32_t magnitude = stored.bits & 0x7fffu;
  const std::uint32_t sign = static_cast<std::uint32_t>(stored.bits & 0x8000u) << 16;
  const float subnormal = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  // The exponent's bias grows by 112; infinity and NaN have the largest exponent in both types.
  const std::uint32_t bias = magnitude >= 0x7c00u ? 2 * (112u << 23) : 112u << 23;
  return float_of(sign | (magnitude < 0x400u ? bits_of(subnormal) : (magnitude << 13) + bias));
}

// Rounds to nearest, and of two to the even one. NaN stays NaN.
inline void narrow(float value, Bfloat16& stored) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const std::uint32_t nan = (bits & 0x80000000u) | 0x7fc00000u;
  stored.bits = static_cast<std::uint16_t>((value != value ? nan : rounded) >> 16);
}

inline void narrow(float value, Float16& stored) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  // Next to 0.5, a float is a multiple of the least float16.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const std::uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x1ffu);
  const std::uint32_t beyond = magnitude > 0x7f800000u ? nan : 0x7c00u;
  const std::uint32_t rounded = magnitude < 0x477ff000u ? finite : beyond;
  stored.bits = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | rounded);
}

// A codec has
//   num_arrays     how many arrays store the numbers,
//   is_in_place    whether one array holds the numbers as rules compute with them, and no other,
//   per_block      how many codes share a scale; 0 if there are none,
//   is_rounded     whether a rule with stochastic rounding rounds the numbers at random,
//   of(value)      a number as it is once stored (codecs of variables alone),
//   View           the `size` numbers from a place of its arrays on: each may be read, and then
//                  written once; `close` is called when all are written.

struct CodecDefaults {
  static constexpr int num_arrays = 1;
  static constexpr bool is_in_place = false;
  static constexpr int per_block = 0;
  static constexpr bool is_rounded = false;

  static float of(float value) { return value; }
};

// An array of numbers as rules compute with them.
template <class Real>
struct Plain : CodecDefaults {
  static constexpr bool is_in_place = true;

  static Real of(Real value) { return value; }

  struct View {
    Real* numbers;

    void open(void* const* arrays, Place at, long long) {
      numbers = static_cast<Real*>(arrays[0]) + at.element;
    }
    Real read(long long i) const { return numbers[i]; }
    void write(long long i, Real value) const { numbers[i] = value; }
    void close() const {}
  };
};

// An array of Bfloat16 or Float16.
template <class Stored>
struct Cast : CodecDefaults {
  static constexpr bool is_rounded = std::is_same<Stored, Bfloat16>::value;

  static float of(float value) {
    Stored stored;
    narrow(value, stored);
    return widened(stored);
  }

  struct View {
    Stored* stored;

    void open(void* const* arrays, Place at, long long) {
      stored = static_cast<Stored*>(arrays[0]) + at.element;
    }
    float read(long long i) const { return widened(stored[i]); }
    void write(long long i, float value) const { narrow(value, stored[i]); }
    void close() const {}
  };
};

// A master copy of the weights, and the weights as Bfloat16 or Float16, which are never read.
template <class Stored>
struct MasterAndCopy : CodecDefaults {
  static constexpr int num_arrays = 2;

  struct View {
    float* masters;
    Stored* copies;

    void open(void* const* arrays, Place at, long long) {
      masters = static_cast<float*>(arrays[0]) + at.element;
      copies = static_cast<Stored*>(arrays[1]) + at.element;
    }
    float read(long long i) const { return masters[i]; }
    void write(long long i, float value) const {
      masters[i] = value;
      narrow(value, copies[i]);
    }
    void close() const {}
  };
};

// Weights in bfloat16, and the lower bits of their master copy.
struct Split : CodecDefaults {
  static constexpr int num_arrays = 2;

  struct View {
    Bfloat16* weights;
    std::uint16_t* rest;

    void open(void* const* arrays, Place at, long long) {
      weights = static_cast<Bfloat16*>(arrays[0]) + at.element;
      rest = static_cast<std::uint16_t*>(arrays[1]) + at.element;
    }
    float read(long long i) const { return float_of(joined({weights[i].bits, rest[i]})); }
    void write(long long i, float value) const {
      const Halves halves = split(bits_of(value));
      weights[i].bits = halves.weight;
      rest[i] = halves.remainder;
    }
    void close() const {}
  };
};

template <const SlotTables& tables>
inline const SlotTables& looked_up() {
  return tables;
}

// Codes in 8 bits, and a scale for each block of them: a view is a block. Numbers that are written
// are finite. `Code` is a struct derived from `BlockCode`.
template <class Code, int codes_of_block>
struct Coded : CodecDefaults {
  static constexpr int num_arrays = 2;
  static constexpr int per_block = codes_of_block;

  struct View {
    float numbers[per_block];
    unsigned char* codes;
    float* scale;
    long long size;

    __attribute__((always_inline)) void open(void* const* arrays, Place at, long long length) {
      codes = static_cast<unsigned char*>(arrays[0]) + at.element;
      scale = static_cast<float*>(arrays[1]) + at.block;
      size = length;
      const float unit = *scale;
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i) numbers[i] = Code::decode(codes[i], unit);
    }
    float read(long long i) const { return numbers[i]; }
    void write(long long i, float value) { numbers[i] = value; }
    __attribute__((always_inline)) void close() {
      float magnitudes[per_block];
      // As integers, floats that are not below 0 have the same order, and a vector has their
      // largest.
      int largest = 0;
      for (long long i = 0; i < size; ++i) {
        magnitudes[i] = absolute(Code::to_store(numbers[i]));
        const int bits = static_cast<int>(bits_of(magnitudes[i]));
        largest = bits > largest ? bits : largest;
      }
      *scale = Code::scale(float_of(static_cast<std::uint32_t>(largest)));
      const float divisor = *scale > 0 ? *scale : 1;
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i)
        codes[i] = static_cast<unsigned char>(
            Code::encode(magnitudes[i] / divisor, numbers[i] < 0) >> 8 * Code::byte_of_code);
    }
  };
};

}  // namespace gpuopt
