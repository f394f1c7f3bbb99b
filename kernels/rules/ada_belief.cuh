// AdaBelief (Zhuang et al. 2020, algorithm 2), with an epsilon for each of its two places.
// Mirrors `ada_belief` in gpuopt/optimizers/ada_belief.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct AdaBelief {
  static constexpr int num_slots = 2;  // m, s

  template <class Real>
  struct Scalars {
    Real step_size, beta1, beta2, epsilon, epsilon_root;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& variance = slot[1];
    m += (Real(1) - s.beta1) * (grad - m);
    variance += (Real(1) - s.beta2) * ((grad - m) * (grad - m) - variance) + s.epsilon_root;
    var -= s.step_size * m / (square_root(variance) + s.epsilon);
  }
};

}  // namespace gpuopt
