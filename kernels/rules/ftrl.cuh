// FTRL-Proximal (McMahan et al. 2013, algorithm 1): the weight is rebuilt from `linear`.
// Mirrors `ftrl` in gpuopt/optimizers/ftrl.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct Ftrl {
  static constexpr int num_slots = 2;  // accum, linear

  template <class Real>
  struct Scalars {
    Real learning_rate, power, l1, l2, l2_shrinkage;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& accum = slot[0];
    Real& linear = slot[1];
    const Real new_accum = accum + grad * grad;
    const Real new_power = to_power(new_accum, s.power);
    linear += grad + Real(2) * s.l2_shrinkage * var -
              (new_power - to_power(accum, s.power)) / s.learning_rate * var;
    accum = new_accum;
    const Real rebuilt =
        (clip(linear, s.l1) - linear) / (new_power / s.learning_rate + Real(2) * s.l2);
    var = absolute(linear) <= s.l1 ? Real(0) : rebuilt;
  }

 private:
  template <class Real>
  GPUOPT_INLINE static Real to_power(Real accum, Real exponent) {
    return exponent == Real(0.5) ? square_root(accum) : power(accum, exponent);
  }
};

}  // namespace gpuopt
