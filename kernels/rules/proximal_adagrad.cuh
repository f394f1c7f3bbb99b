// Forward-backward splitting (Duchi & Singer 2009) with Adagrad's step sizes.
// Mirrors `proximal_adagrad` in gpuopt/optimizers/proximal_adagrad.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct ProximalAdagrad {
  static constexpr int num_slots = 1;  // accumulator

  template <class Real>
  struct Scalars {
    Real learning_rate, l1, l2;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& accumulator = slot[0];
    accumulator += grad * grad;
    const Real step_size = s.learning_rate / square_root(accumulator);
    var -= step_size * grad;
    var -= clip(var, step_size * s.l1);
    var /= Real(1) + s.l2 * step_size;
  }
};

}  // namespace gpuopt
