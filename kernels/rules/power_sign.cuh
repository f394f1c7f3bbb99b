// PowerSign (Bello et al. 2017).
// Mirrors `power_sign` in gpuopt/optimizers/power_sign.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct PowerSign {
  static constexpr int num_slots = 1;  // m

  template <class Real>
  struct Scalars {
    Real learning_rate, exponent, beta;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    m = s.beta * m + (Real(1) - s.beta) * grad;
    var -= s.learning_rate * exponential(s.exponent * sign(grad) * sign(m)) * grad;
  }
};

}  // namespace gpuopt
