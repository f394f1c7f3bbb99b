// A gradient that is clipped as it is read, before any rule.
// Mirrors `clipped` in gpuopt/rules/clipped.py.
#pragma once
#include "gradient.cuh"
#include "math.cuh"

// The layout of the scalars is checked by offsetof, and every compiler of ours has it right.
#if !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif

namespace gpuopt {

template <class Rule>
struct Clipped : Rule {
  static constexpr bool is_clipped = true;

  template <class Real>
  struct Scalars : Rule::template Scalars<Real> {
    Real clip_factor, clip_bound;
  };

  template <class Real>
  GPUOPT_INLINE static Real gradient(Real grad, const Scalars<Real>& s) {
    return clip(grad * s.clip_factor, s.clip_bound);
  }

  template <class Real>
  GPUOPT_INLINE static void terms(Real var, Real grad, Real* slot, const Scalars<Real>& s,
                                  Real* terms) {
    Rule::terms(var, gradient(grad, s), slot, s, terms);
  }

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Rule::apply(var, gradient(grad, s), slot, s);
  }
};

}  // namespace gpuopt
