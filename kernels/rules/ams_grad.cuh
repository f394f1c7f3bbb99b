// AMSGrad (Reddi, Kale & Kumar 2018, algorithm 2) with bias corrections of torch's and optax's.
// Mirrors `ams_grad` in gpuopt/optimizers/ams_grad.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct AmsGrad {
  static constexpr int num_slots = 3;  // m, v, vhat

  template <class Real>
  struct Scalars {
    Real step_size, beta1, beta2, epsilon, scale;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& v = slot[1];
    Real& vhat = slot[2];
    m += (Real(1) - s.beta1) * (grad - m);
    v += (Real(1) - s.beta2) * (grad * grad - v);
    vhat = larger(vhat, s.scale * v);
    var -= s.step_size * m / (square_root(vhat) + s.epsilon);
  }
};

}  // namespace gpuopt
