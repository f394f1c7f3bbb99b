// NAdam (Dozat 2016, algorithm 2) with separate steps along the gradient and its average.
// Mirrors `torch_nadam` in gpuopt/optimizers/torch_nadam.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct TorchNadam {
  static constexpr int num_slots = 2;  // m, v

  template <class Real>
  struct Scalars {
    Real gradient_step, average_step, beta1, beta2, epsilon;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& v = slot[1];
    m += (Real(1) - s.beta1) * (grad - m);
    v += (Real(1) - s.beta2) * (grad * grad - v);
    var -= (s.gradient_step * grad + s.average_step * m) / (square_root(v) + s.epsilon);
  }
};

}  // namespace gpuopt
