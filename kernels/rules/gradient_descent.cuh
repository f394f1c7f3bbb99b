// Gradient descent: var -= learning_rate * grad.
// Mirrors `gradient_descent` in gpuopt/optimizers/gradient_descent.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct GradientDescent {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real learning_rate;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    var -= s.learning_rate * grad;
  }
};

}  // namespace gpuopt
