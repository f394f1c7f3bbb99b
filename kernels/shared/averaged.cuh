// A moving average that follows the variable in the same step, after any rule: it is what a pass of
// its own makes of the new variable. The loops around the rule call `follow` once they know what of
// the variable is stored: see `follow_variable` in gradient.cuh.
// Mirrors `averaged` in gpuopt/rules/averaged.py.
#pragma once
#include "moving_average.cuh"

// The layout of the scalars is checked by offsetof, and every compiler of ours has it right.
#if !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif

namespace gpuopt {

template <class Rule>
struct Averaged : Rule {
  static constexpr bool is_averaged = true;
  static constexpr int num_slots = 1 + Rule::num_slots;  // average, and those of the rule

  template <class Real>
  struct Scalars : Rule::template Scalars<Real> {
    Real average_weight;
  };

  template <class Real>
  GPUOPT_INLINE static void terms(Real var, Real grad, Real* slot, const Scalars<Real>& s,
                                  Real* terms) {
    Rule::terms(var, grad, slot + 1, s, terms);
  }

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Rule::apply(var, grad, slot + 1, s);
  }

  template <class Real>
  GPUOPT_INLINE static void follow(Real var, Real* slot, const Scalars<Real>& s) {
    move_average(slot[0], var, s.average_weight);
  }
};

}  // namespace gpuopt
