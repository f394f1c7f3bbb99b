// Forward-backward splitting (Duchi & Singer 2009, section 2).
// Mirrors `proximal_gradient_descent` in gpuopt/optimizers/proximal_gradient_descent.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct ProximalGradientDescent {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real learning_rate, l1, l2;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    var -= s.learning_rate * grad;
    var -= clip(var, s.learning_rate * s.l1);
    var /= Real(1) + s.l2 * s.learning_rate;
  }
};

}  // namespace gpuopt
