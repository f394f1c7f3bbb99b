// A moving average in the place of a variable, which follows a value in the place of a gradient.
// Mirrors gpuopt/rules/moving_average.py.
#pragma once
#include "math.cuh"

namespace gpuopt {

// Moves an average. Rounds as numpy does, so that whatever launch moves it makes the same of it.
template <class Real>
GPUOPT_INLINE void move_average(Real& average, Real value, Real weight) {
  average -= times(average - value, weight);
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
