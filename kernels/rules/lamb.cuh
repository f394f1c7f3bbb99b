// LAMB (You et al. 2020, algorithm 2), in Apex's form.
// Mirrors `lamb` in gpuopt/optimizers/lamb.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Lamb {
  static constexpr int num_slots = 2;  // m, v
  static constexpr int num_sums = 2;

  template <class Real>
  struct Scalars {
    Real learning_rate, correction, beta1, beta2, epsilon, weight_decay, is_adapted;
    Real weights_squared, update_squared;
  };

  template <class Real>
  GPUOPT_INLINE static Real update(Real var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& v = slot[1];
    m += (Real(1) - s.beta1) * (grad - m);
    v += (Real(1) - s.beta2) * (grad * grad - v);
    return s.correction * m / (square_root(v) + s.epsilon) + s.weight_decay * var;
  }

  template <class Real>
  GPUOPT_INLINE static void terms(Real var, Real grad, Real* slot, const Scalars<Real>& s,
                                  Real* terms) {
    const Real step = update(var, grad, slot, s);
    terms[0] = s.is_adapted * var * var;
    terms[1] = step * step;
  }

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    const bool is_adapted = s.weights_squared > Real(0) && s.update_squared > Real(0);
    const Real ratio = is_adapted ? s.weights_squared / s.update_squared : Real(1);
    const Real rate = s.learning_rate * square_root(ratio);
    var -= rate * update(var, grad, slot, s);
  }
};

}  // namespace gpuopt
