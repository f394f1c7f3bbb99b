// RMSProp with momentum (Graves 2013), epsilon inside the root.
// Mirrors `rms_prop` and `centered_rms_prop` in gpuopt/optimizers/rms_prop.py.
#pragma once
#include "../shared/math.cuh"

namespace gpuopt {

struct RmsProp {
  static constexpr int num_slots = 2;  // rms, momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, decay, momentum_decay, epsilon;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& rms = slot[0];
    Real& momentum = slot[1];
    rms += (Real(1) - s.decay) * (grad * grad - rms);
    momentum = s.momentum_decay * momentum + s.learning_rate * grad / square_root(rms + s.epsilon);
    var -= momentum;
  }
};

struct CenteredRmsProp {
  static constexpr int num_slots = 3;  // rms, mg, momentum

  template <class Real>
  struct Scalars {
    Real learning_rate, decay, momentum_decay, epsilon;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real& rms = slot[0];
    Real& mg = slot[1];
    Real& momentum = slot[2];
    rms += (Real(1) - s.decay) * (grad * grad - rms);
    mg += (Real(1) - s.decay) * (grad - mg);
    momentum = s.momentum_decay * momentum +
               s.learning_rate * grad / square_root(rms - mg * mg + s.epsilon);
    var -= momentum;
  }
};

}  // namespace gpuopt
