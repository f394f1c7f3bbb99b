// RAdam (Liu et al. 2020, algorithm 2). The host decides whether a step is rectified.
// Mirrors `r_adam` in gpuopt/optimizers/r_adam.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct RAdam {
  static constexpr int num_slots = 2;  // m, v

  template <class Real>
  struct Scalars {
    Real step_size, beta1, beta2, epsilon, is_rectified;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& v = slot[1];
    m += (Real(1) - s.beta1) * (grad - m);
    v += (Real(1) - s.beta2) * (grad * grad - v);
    const Real divisor = s.is_rectified != Real(0) ? square_root(v) + s.epsilon : Real(1);
    var -= s.step_size * m / divisor;
  }
};

}  // namespace gpuopt
