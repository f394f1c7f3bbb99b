// Sums of gradients over several steps, in the place of a variable. The last step divides them, by
// how many there were for their mean, and by 1 for their sum; all others divide by 1.
// Mirrors gpuopt/rules/accumulation.py.
#pragma once
#include "math.cuh"

namespace gpuopt {

// A sum's first gradient: what was there before is not read.
struct BeginSum {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real divisor;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    var = grad / s.divisor;
  }
};

struct AddToSum {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real divisor;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    var = (var + grad) / s.divisor;
  }
};

// The sum of a row's gradients. With a `zero` of 0, -0 becomes 0.
struct PlaceSum {
  static constexpr int num_slots = 0;

  template <class Real>
  struct Scalars {
    Real zero;
  };

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>& s) {
    var = grad + s.zero;
  }
};

}  // namespace gpuopt
