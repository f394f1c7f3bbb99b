// Mirrors `four_slots` in four_slots.py.
#pragma once
#include "shared/math.cuh"

namespace tests {

struct FourSlots {
  static constexpr int num_slots = 4;

  template <class Real>
  struct Scalars {
    Real step_size;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    for (int k = 0; k < num_slots; ++k) slot[k] += (grad - slot[k]) / Real(k + 2);
    var -= s.step_size * (slot[0] + slot[1] + slot[2] + slot[3]);
  }
};

}  // namespace tests
