// Adagrad's step with an accumulator that stays as it is.
// Mirrors `frozen_adagrad` in gpuopt/optimizers/reg_adagrad.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct FrozenAdagrad {
  static constexpr int num_slots = 1;  // accumulator

  template <class Real>
  struct Scalars {
    Real learning_rate;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    var -= s.learning_rate * grad / square_root(slot[0]);
  }
};

}  // namespace gpuopt
