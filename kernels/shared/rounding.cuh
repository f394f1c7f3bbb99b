// The numbers of elements in their variable, and stochastic rounding of results by these numbers.
// Compiles as CUDA and as plain C++17. Mirrors `round_at_random` in gpuopt/rules/rounded.py.
#pragma once
#if !defined(__CUDACC__)
#include <cstring>
#endif

#include "element.cuh"
#include "rule.cuh"

namespace gpuopt {

// Returns the bits of a float that is a bfloat16: a neighbour of the given one, the upper one with
// the probability of its distance from the lower one, by 16 random bits. Beyond the last finite
// bfloat16, the nearest one. Every NaN stays some NaN.
GPUOPT_INLINE unsigned int rounded_bits(unsigned int bits, unsigned int random) {
  const unsigned int magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (bits & 0xffff0000u) | 0x400000u;
  return (bits + (magnitude >= 0x7f7f0000u ? 0x8000u : random)) & 0xffff0000u;
}

GPUOPT_INLINE void round_by(float& value, unsigned int random) {
  unsigned int bits;
  memcpy(&bits, &value, sizeof bits);
  bits = rounded_bits(bits, random);
  memcpy(&value, &bits, sizeof bits);
}

// Which arrays are rounded, for `Numbered::round`: the variable, and all slots or none.
template <bool is_var, bool are_slots>
struct IsRoundedAlike {
  GPUOPT_INLINE static constexpr bool of(int k) { return k == 0 ? is_var : are_slots; }
};

// Consecutive elements of a variable. Compilers drop the numbers if nothing uses them.
struct Numbered {
  long long first = 0;         // the place of the first one in the variable
  long long first_number = 0;  // of the variable's first element, for stages of the gradient

  GPUOPT_INLINE void count_from(long long elements) { first += elements; }
  // Returns the number of element `i`, counted from the first one, for stages of the gradient.
  GPUOPT_INLINE unsigned long long number(long long i) const {
    return static_cast<unsigned long long>(first_number + first + i);
  }

  // Rounds the rule's results for element `i`, counted from the first one. Array number `k` (0 is
  // the variable, then come the slots) is rounded if `IsRounded::of(k)`, by 16 bits of word number
  // `k / 4` of the element. An average, which precedes the slots, is not rounded.
  template <class Rule, class IsRounded, class Scalars>
  GPUOPT_INLINE void round(int i, const Scalars& s, float& var, float* slot) const {
    constexpr int num_slots = Rule::num_slots - Rule::num_averages;
    constexpr int words = (num_slots + 4) / 4;
    const unsigned long long number = static_cast<unsigned long long>(first + i) * words;
    unsigned long long random = Rule::random(number, s);
    if (IsRounded::of(0)) round_by(var, random & 0xffffu);
#pragma unroll
    for (int k = 1; k <= num_slots; ++k) {
      if (k % 4 == 0) random = Rule::random(number + k / 4, s);
      if (IsRounded::of(k))
        round_by(slot[Rule::num_averages + k - 1],
                 static_cast<unsigned int>(random >> k % 4 * 16) & 0xffffu);
    }
  }
};

}  // namespace gpuopt
