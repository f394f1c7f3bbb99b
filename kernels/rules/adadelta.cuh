// Adadelta (Zeiler 2012, algorithm 1), with a learning rate after it.
// Mirrors `adadelta` in gpuopt/optimizers/adadelta.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Adadelta {
  static constexpr int num_slots = 2;  // accum, accum_update

  template <class Real>
  struct Scalars {
    Real learning_rate, rho, epsilon;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& accum = slot[0];
    Real& accum_update = slot[1];
    accum = s.rho * accum + (Real(1) - s.rho) * (grad * grad);
    const Real update =
        square_root(accum_update + s.epsilon) / square_root(accum + s.epsilon) * grad;
    accum_update = s.rho * accum_update + (Real(1) - s.rho) * (update * update);
    var -= s.learning_rate * update;
  }
};

}  // namespace gpuopt
