// Schedule-Free AdamW (Defazio et al. 2024): the variable is y, and its slot is z - y.
// Mirrors `schedule_free_adam_w` in gpuopt/optimizers/schedule_free_adam_w.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct ScheduleFreeAdamW {
  static constexpr int num_slots = 2;  // z_minus_y, v

  template <class Real>
  struct Scalars {
    Real step_size, decay, beta1, beta2, epsilon, weight;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& z_minus_y = slot[0];
    Real& v = slot[1];
    v += (Real(1) - s.beta2) * (grad * grad - v);
    const Real step = s.step_size * grad / (square_root(v) + s.epsilon) + s.decay * var;
    const Real kept = (Real(1) - s.weight) * (z_minus_y - s.beta1 * step);
    var += z_minus_y - step - kept;
    z_minus_y = kept;
  }
};

}  // namespace gpuopt
