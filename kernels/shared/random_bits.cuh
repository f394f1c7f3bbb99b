// Random bits that depend on a key and a number alone: SplitMix64 (Steele, Lea & Flood 2014).
// Compiles as CUDA and as plain C++17. Mirrors gpuopt/rules/random_bits.py.
#pragma once
#include "element.cuh"

namespace gpuopt {

// 2^64 divided by the golden ratio.
constexpr unsigned long long golden = 0x9E3779B97F4A7C15ull;

// Returns the generator's word for a state.
GPUOPT_INLINE unsigned long long mix(unsigned long long bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
  return bits ^ (bits >> 31);
}

}  // namespace gpuopt
