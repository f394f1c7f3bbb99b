// Steps against the gradient's sign alone (Liang et al. 2024), of any rule whose step does not
// depend on the variable. Mirrors `cautious` in gpuopt/rules/cautious.py.
#pragma once
#include "math.cuh"

// The layout of the scalars is checked by offsetof, and every compiler of ours has it right.
#if !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif

namespace gpuopt {

template <class Rule>
struct Cautious {
  static constexpr int num_slots = Rule::num_slots;
  static constexpr int num_sums = 2;

  template <class Real>
  struct Scalars : Rule::template Scalars<Real> {
    Real agreeing, elements;
  };

  template <class Real>
  GPUOPT_INLINE static Real step_of(Real grad, Real* slot, const Scalars<Real>& s) {
    Real step = Real(0);
    Rule::apply(step, grad, slot, s);
    return step;
  }

  template <class Real>
  GPUOPT_INLINE static void terms(Real, Real grad, Real* slot, const Scalars<Real>& s,
                                  Real* terms) {
    terms[0] = sign(step_of(grad, slot, s)) * grad < Real(0) ? Real(1) : Real(0);
    terms[1] = Real(1);
  }

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    const Real factor = Real(1) / larger(s.agreeing / s.elements, Real(1e-3));
    const Real step = step_of(grad, slot, s);
    var += step * (sign(step) * grad < Real(0) ? factor : Real(0));
  }
};

}  // namespace gpuopt
