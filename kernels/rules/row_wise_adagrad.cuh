// Adagrad with one accumulator for each row: FBGEMM's EXACT_ROWWISE_ADAGRAD.
// Mirrors `row_wise_adagrad` in gpuopt/optimizers/row_wise_adagrad.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct RowWiseAdagrad {
  static constexpr int num_slots = 1;  // accumulator
  static constexpr int num_row_slots = 1;

  template <class Real>
  struct Scalars {
    Real learning_rate, epsilon, mean_square;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& accumulator = slot[0];
    accumulator += s.mean_square;
    var -= s.learning_rate / (square_root(accumulator) + s.epsilon) * grad;
  }
};

}  // namespace gpuopt
