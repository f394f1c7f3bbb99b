// Adam with the "epsilon hat" of Kingma & Ba 2015, end of section 2.
// Mirrors `adam` in gpuopt/optimizers/adam.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Adam {
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
    v += (Real(1) - s.beta2) * (grad * grad - v);
    var -= s.step_size * m / (square_root(v) + s.epsilon);
  }
};

}  // namespace gpuopt
