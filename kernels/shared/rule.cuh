// Defaults of a rule's functor, which the loops around it read.
// Functors are generated from functions of Python: sample_program.cuh is one. Compiles as CUDA and
// as plain C++17, as rules do.
#pragma once
#include "element.cuh"

namespace gpuopt {

struct RuleDefaults {
  static constexpr int num_row_slots = 0;     // the last slots, with one number for each row
  static constexpr int num_sums = 0;          // scalars that are sums over the variable
  static constexpr int first_sum = -1;        // the first of them, if a launch is given the sums
  static constexpr int num_averages = 0;      // the first slots, which follow the variable
  static constexpr bool is_unscaled = false;  // whether it takes the scalar `unscale`
  static constexpr bool is_clipped = false;   // whether it takes the scalar `clip_factor`
  static constexpr bool is_rounded = false;   // whether what it writes is rounded at random
  static constexpr bool has_gradient_slots = false;  // whether `gradient` takes slots
  static constexpr int written = -1;  // bit 0: it writes the variable; bit 1 + k: slot k

  // The degree of a sum in the gradient, if it is over the variable and the gradient alone.
  GPUOPT_INLINE static constexpr int degree(int) { return -1; }

  // Reads the gradient of an element, given the element's number in its variable, and its slots.
  // Every loop calls `apply` and `terms` with the result. It may write slots: a loop that reads the
  // gradient twice stores them once, and gives it copies before.
  template <class Real, class Scalars>
  GPUOPT_INLINE static Real gradient(Real grad, unsigned long long, Real*, const Scalars&) {
    return grad;
  }

  // Moves averages towards the stored variable. Every loop calls it after `apply`, and after
  // rounding, with the same slots.
  template <class Real, class Scalars>
  GPUOPT_INLINE static void follow(Real, Real*, const Scalars&) {}
};

template <class Rule>
constexpr bool writes_var = (Rule::written & 1) != 0;

template <class Rule>
GPUOPT_INLINE constexpr bool writes_slot(int k) {
  return (Rule::written >> (k + 1) & 1) != 0;
}

}  // namespace gpuopt
