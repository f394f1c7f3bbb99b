// The bits of a float as those of a bfloat16 and the 16 that are missing: rounded half up, the
// bfloat16 is the weight. Compiles as CUDA and as plain C++17. Mirrors gpuopt/rules/split.py.
#pragma once
#include "element.cuh"

namespace gpuopt {

struct Halves {
  unsigned short weight;     // the bits of a bfloat16
  unsigned short remainder;  // the lower bits of the float
};

// Every pattern that is no NaN comes back to the bit, and every NaN as one: rounded up, some would
// become infinite, or 0.
GPUOPT_INLINE Halves split(unsigned int bits) {
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const unsigned int whole = is_nan ? (bits & 0xff800000u) | 0x400000u : bits;
  return {static_cast<unsigned short>((whole + 0x8000u) >> 16), static_cast<unsigned short>(whole)};
}

GPUOPT_INLINE unsigned int joined(Halves halves) {
  const unsigned int upper = halves.weight - (halves.remainder >> 15);
  return upper << 16 | halves.remainder;
}

}  // namespace gpuopt
