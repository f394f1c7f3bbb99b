// LARS (You, Gitman & Ginsburg 2017) in TensorFlow 1's form: the learning rate scales what is
// accumulated.
// Mirrors `lars` and `unscaled_lars` in gpuopt/optimizers/lars.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct UnscaledLars {
  static constexpr int num_slots = 1;  // momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, decay, is_nesterov;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    move(var, s.learning_rate * grad, slot[0], s);
  }

  template <class Real, class Scalars>
  GPUOPT_INLINE static void move(Real& var, Real step, Real& momentum, const Scalars& s) {
    momentum = s.decay * momentum + step;
    var -= s.is_nesterov != Real(0) ? step + s.decay * momentum : momentum;
  }
};

struct Lars {
  static constexpr int num_slots = 1;  // momentum
  static constexpr int num_sums = 2;

  template <class Real>
  struct Scalars {
    Real learning_rate, decay, weight_decay, eeta, epsilon, is_nesterov;
    Real weights_squared, gradient_squared;
  };

  GPUOPT_INLINE static constexpr int degree(int sum) { return sum == 0 ? 0 : 2; }

  template <class Real>
  GPUOPT_INLINE static void terms(Real var, Real grad, Real*, const Scalars<Real>&, Real* terms) {
    terms[0] = var * var;
    terms[1] = grad * grad;
  }

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    const Real norm = square_root(s.weights_squared);
    const Real scale = square_root(s.gradient_squared) + s.weight_decay * norm + s.epsilon;
    const bool is_scaled = s.weights_squared > Real(0) && s.gradient_squared > Real(0);
    const Real rate = s.learning_rate * (is_scaled ? s.eeta * norm / scale : Real(1));
    UnscaledLars::move(var, rate * (grad + s.weight_decay * var), slot[0], s);
  }
};

}  // namespace gpuopt
