// Weight decay before any rule (Loshchilov & Hutter 2019, algorithm 2).
// Mirrors gpuopt/rules/decayed.py.
#pragma once
#include "math.cuh"

// The layout of the scalars is checked by offsetof, and every compiler of ours has it right.
#if !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif

namespace gpuopt {

template <class Rule>
struct Decayed : Rule {
  template <class Real>
  struct Scalars : Rule::template Scalars<Real> {
    Real weight_decay;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    var -= s.weight_decay * var;
    Rule::apply(var, grad, slot, s);
  }
};

// The same, but where the gradient is -0: there, nothing decays.
template <class Rule>
struct DecayedRows : Decayed<Rule> {
  template <class Real>
  using Scalars = typename Decayed<Rule>::template Scalars<Real>;

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    var = is_negative_zero(grad) ? var : var - s.weight_decay * var;
    Rule::apply(var, grad, slot, s);
  }
};

}  // namespace gpuopt
