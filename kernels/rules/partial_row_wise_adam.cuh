// Adam with one mean square for each row: FBGEMM's PARTIAL_ROWWISE_ADAM.
// Mirrors `partial_row_wise_adam` in gpuopt/optimizers/partial_row_wise_adam.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct PartialRowWiseAdam {
  static constexpr int num_slots = 2;  // m, v
  static constexpr int num_row_slots = 1;

  template <class Real>
  struct Scalars {
    Real step_size, beta1, beta2, epsilon, mean_square;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& m = slot[0];
    Real& v = slot[1];
    m += (Real(1) - s.beta1) * (grad - m);
    v += (Real(1) - s.beta2) * (s.mean_square - v);
    var -= s.step_size / (square_root(v) + s.epsilon) * m;
  }
};

}  // namespace gpuopt
