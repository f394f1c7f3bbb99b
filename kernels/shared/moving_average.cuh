// A moving average in the place of a variable, which follows a value in the place of a gradient.
// Mirrors gpuopt/rules/moving_average.py.
#pragma once
#include "element.cuh"

namespace gpuopt {

// Moves an average.
template <class Real>
GPUOPT_INLINE void move_average(Real& average, Real value, Real weight) {
  average -= (average - value) * weight;
}

struct MovingAverage {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real average_weight;  // one less the weight of the old average
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    move_average(var, grad, s.average_weight);
  }
};

}  // namespace gpuopt
