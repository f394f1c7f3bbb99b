// Lion (Chen et al. 2023, algorithm 2).
// Mirrors `lion` in gpuopt/optimizers/lion.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Lion {
  static constexpr int num_slots = 1;  // m

  template <class Real>
  struct Scalars {
    Real learning_rate, beta1, beta2;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    var -= s.learning_rate * sign(s.beta1 * m + (Real(1) - s.beta1) * grad);
    m += (Real(1) - s.beta2) * (grad - m);
  }
};

}  // namespace gpuopt
