// Nadam (Dozat 2016) with separate steps along the gradient and its average, and what TensorFlow's
// does to rows without a gradient.
// Mirrors `nadam` and `nadam_decay` in gpuopt/optimizers/nadam.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Nadam {
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

struct NadamDecay {
  static constexpr int num_slots = 2;  // m, v

  template <class Real>
  struct Scalars {
    Real beta1, beta2;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real&, Real, Real* slot, const Scalars<Real>& s) {
    slot[0] *= s.beta1;
    slot[1] *= s.beta2;
  }
};

}  // namespace gpuopt
