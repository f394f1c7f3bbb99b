// Momentum in TensorFlow 1's form: the learning rate scales the buffer when it is used, not when it
// is accumulated.
// Mirrors `momentum` and `nesterov_momentum` in gpuopt/optimizers/momentum.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Momentum {
  static constexpr int num_slots = 1;  // momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, decay;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& momentum = slot[0];
    momentum = s.decay * momentum + grad;
    var -= s.learning_rate * momentum;
  }
};

struct NesterovMomentum {
  static constexpr int num_slots = 1;  // momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, decay;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& momentum = slot[0];
    momentum = s.decay * momentum + grad;
    var -= s.learning_rate * (grad + s.decay * momentum);
  }
};

}  // namespace gpuopt
