// How numbers are stored in 16 bits in host memory, where rules compute in float. No branches, and
// integers alone where numbers may be subnormal: so loops over them use vectors and never trap.
#pragma once
#include <cstdint>
#include <cstring>

#include "../shared/split.cuh"

namespace gpuopt {

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

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

}  // namespace gpuopt
