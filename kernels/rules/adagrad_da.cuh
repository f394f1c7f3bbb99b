// Adagrad with dual averaging (Duchi, Hazan & Singer 2011): the weight is rebuilt from the sums.
// Mirrors `adagrad_da` in gpuopt/optimizers/adagrad_da.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct AdagradDa {
  static constexpr int num_slots = 2;  // gradient_accumulator, gradient_squared_accumulator

  template <class Real>
  struct Scalars {
    Real learning_rate, l1_threshold, l2_scale;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& gradient_accumulator = slot[0];
    Real& gradient_squared_accumulator = slot[1];
    gradient_accumulator += grad;
    gradient_squared_accumulator += grad * grad;
    const Real beyond = gradient_accumulator - clip(gradient_accumulator, s.l1_threshold);
    var = -s.learning_rate * beyond / (s.l2_scale + square_root(gradient_squared_accumulator));
  }
};

}  // namespace gpuopt
