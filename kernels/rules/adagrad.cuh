// Adagrad (Duchi, Hazan & Singer 2011) without epsilon: the accumulator starts above zero.
// Mirrors `adagrad` in gpuopt/optimizers/adagrad.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Adagrad {
  static constexpr int num_slots = 1;  // accumulator

  template <class Real>
  struct Scalars {
    Real learning_rate;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& accumulator = slot[0];
    accumulator += grad * grad;
    var -= s.learning_rate * grad / square_root(accumulator);
  }
};

}  // namespace gpuopt
