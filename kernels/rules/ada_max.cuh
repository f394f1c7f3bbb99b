// AdaMax (Kingma & Ba 2015, algorithm 2), with an epsilon.
// Mirrors `ada_max` in gpuopt/optimizers/ada_max.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct AdaMax {
  static constexpr int num_slots = 2;  // m, v

  template <class Real>
  struct Scalars {
    Real step_size, beta1, beta2, epsilon;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& v = slot[1];
    m += (Real(1) - s.beta1) * (grad - m);
    v = larger(s.beta2 * v, absolute(grad));
    var -= s.step_size * m / (v + s.epsilon);
  }
};

}  // namespace gpuopt
