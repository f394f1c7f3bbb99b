// How the arrays of an update are stored in host memory. A codec reads the numbers of a tile as
// rules compute with them, and writes them back; rules and codecs do not depend on each other.
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

// The most elements that are read and written at a time: they stay in the first-level cache.
constexpr long long most_in_tile = 512;

// Where a tile begins in its arrays: in elements, and in blocks of codes.
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
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
  stored.bits = static_cast<std::uint16_t>(is_nan ? nan : rounded);
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
//   has_blocks     whether a tile is a block of codes with a scale,
//   of(value)      a number as it is once stored (codecs of variables alone),
//   Tile           which reads `size` numbers from a place of its arrays, and writes them back.

// An array of numbers as rules compute with them.
template <class Real>
struct Plain {
  static constexpr int num_arrays = 1;
  static constexpr bool is_in_place = true;
  static constexpr bool has_blocks = false;

  static Real of(Real value) { return value; }

  struct Tile {
    Real* read(void* const* arrays, Place at, long long) {
      return static_cast<Real*>(arrays[0]) + at.element;
    }
    void write(void* const*, Place, long long) const {}
  };
};

// An array of Bfloat16 or Float16.
template <class Stored>
struct Cast {
  static constexpr int num_arrays = 1;
  static constexpr bool is_in_place = false;
  static constexpr bool has_blocks = false;

  static float of(float value) {
    Stored stored;
    narrow(value, stored);
    return widened(stored);
  }

  struct Tile {
    float numbers[most_in_tile];

    float* read(void* const* arrays, Place at, long long size) {
      const Stored* const from = static_cast<const Stored*>(arrays[0]) + at.element;
      for (long long i = 0; i < size; ++i) numbers[i] = widened(from[i]);
      return numbers;
    }
    void write(void* const* arrays, Place at, long long size) const {
      Stored* const to = static_cast<Stored*>(arrays[0]) + at.element;
      for (long long i = 0; i < size; ++i) narrow(numbers[i], to[i]);
    }
  };
};

// A master copy of the weights, and the weights as Bfloat16 or Float16, which are never read.
template <class Stored>
struct MasterAndCopy {
  static constexpr int num_arrays = 2;
  static constexpr bool is_in_place = false;
  static constexpr bool has_blocks = false;

  static float of(float value) { return value; }

  struct Tile {
    float* read(void* const* arrays, Place at, long long) {
      return static_cast<float*>(arrays[0]) + at.element;
    }
    void write(void* const* arrays, Place at, long long size) const {
      const float* const from = static_cast<const float*>(arrays[0]) + at.element;
      Stored* const to = static_cast<Stored*>(arrays[1]) + at.element;
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i) narrow(from[i], to[i]);
    }
  };
};

// Weights in bfloat16, and the lower bits of their master copy.
struct Split {
  static constexpr int num_arrays = 2;
  static constexpr bool is_in_place = false;
  static constexpr bool has_blocks = false;

  static float of(float value) { return value; }

  struct Tile {
    float numbers[most_in_tile];

    float* read(void* const* arrays, Place at, long long size) {
      const Bfloat16* const weights = static_cast<const Bfloat16*>(arrays[0]) + at.element;
      const std::uint16_t* const rest = static_cast<const std::uint16_t*>(arrays[1]) + at.element;
      for (long long i = 0; i < size; ++i)
        numbers[i] = float_of(joined({weights[i].bits, rest[i]}));
      return numbers;
    }
    void write(void* const* arrays, Place at, long long size) const {
      Bfloat16* const weights = static_cast<Bfloat16*>(arrays[0]) + at.element;
      std::uint16_t* const rest = static_cast<std::uint16_t*>(arrays[1]) + at.element;
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i) {
        const Halves halves = split(bits_of(numbers[i]));
        weights[i].bits = halves.weight;
        rest[i] = halves.remainder;
      }
    }
  };
};

// The lookup table of each map. Set once, before the first update.
inline const SlotTables* slot_tables = nullptr;

// Codes in 8 bits, and a scale for each block of them: a tile is a block. Numbers that are written
// are finite.
template <int coding>
struct Byte {
  static constexpr int num_arrays = 2;
  static constexpr bool is_in_place = false;
  static constexpr bool has_blocks = true;

  struct Tile {
    float numbers[block_codes];

    __attribute__((always_inline)) float* read(void* const* arrays, Place at, long long size) {
      const unsigned char* const codes = static_cast<const unsigned char*>(arrays[0]) + at.element;
      const float scale = static_cast<const float*>(arrays[1])[at.block];
      const SlotTables& tables = slot_tables[map_of(coding)];
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i) numbers[i] = decode(coding, tables, codes[i], scale);
      return numbers;
    }
    __attribute__((always_inline)) void write(void* const* arrays, Place at, long long size) const {
      const SlotTables& tables = slot_tables[map_of(coding)];
      float magnitudes[block_codes];
      int places[block_codes];
      // As integers, floats that are not below 0 have the same order, and a vector has their
      // largest.
      int largest = 0;
      for (long long i = 0; i < size; ++i) {
        magnitudes[i] = absolute(to_store(coding, numbers[i]));
        const int bits = static_cast<int>(bits_of(magnitudes[i]));
        largest = bits > largest ? bits : largest;
      }
      const float scale = float_of(static_cast<std::uint32_t>(largest));
      const float divisor = scale > 0 ? scale : 1;
      for (long long i = 0; i < size; ++i) {
        magnitudes[i] /= divisor;
        places[i] = place_of(magnitudes[i]);
      }
      for (long long i = 0; i < size; ++i) places[i] = tables.first[places[i]];
      unsigned char* const codes = static_cast<unsigned char*>(arrays[0]) + at.element;
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i)
        codes[i] = static_cast<unsigned char>(
            code_of(coding, tables, places[i], magnitudes[i], numbers[i] < 0));
      static_cast<float*>(arrays[1])[at.block] = scale;
    }
  };
};

}  // namespace gpuopt
