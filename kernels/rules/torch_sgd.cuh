// Gradient descent in torch's form: the decay of the weights is a part of the gradient.
// Mirrors `torch_sgd`, `torch_momentum` and `torch_nesterov` in gpuopt/optimizers/torch_sgd.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct TorchSgd {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real learning_rate, weight_decay;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    var -= s.learning_rate * (grad + s.weight_decay * var);
  }
};

struct TorchMomentum {
  static constexpr int num_slots = 1;  // momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, weight_decay, decay, added;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& momentum = slot[0];
    momentum = s.decay * momentum + s.added * (grad + s.weight_decay * var);
    var -= s.learning_rate * momentum;
  }
};

struct TorchNesterov {
  static constexpr int num_slots = 1;  // momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, weight_decay, decay;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& momentum = slot[0];
    const Real step = grad + s.weight_decay * var;
    momentum = s.decay * momentum + step;
    var -= s.learning_rate * (step + s.decay * momentum);
  }
};

}  // namespace gpuopt
