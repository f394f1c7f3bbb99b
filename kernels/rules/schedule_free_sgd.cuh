// Schedule-Free SGD (Defazio et al. 2024): the variable is y, and its slot is z - y.
// Mirrors `schedule_free_sgd` in gpuopt/optimizers/schedule_free_sgd.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct ScheduleFreeSgd {
  static constexpr int num_slots = 1;  // z_minus_y

  template <class Real>
  struct Scalars {
    Real learning_rate, beta1, weight_decay, weight;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& z_minus_y = slot[0];
    const Real step = s.learning_rate * (grad + s.weight_decay * var);
    const Real kept = (Real(1) - s.weight) * (z_minus_y - s.beta1 * step);
    var += z_minus_y - step - kept;
    z_minus_y = kept;
  }
};

}  // namespace gpuopt
