// What a row needs that has missed many steps; gpuopt/rules/catch_up.py derives it. Compiles as
// CUDA (nvcc, NVRTC) and as plain C++17, as rules do.
#pragma once
#include "math.cuh"

namespace gpuopt {

// Which slots and scalar of a rule move rows that have no gradient. Mirrors `Movement` in
// gpuopt/rules/unnamed.py; `moves` is false if they stay.
template <class OtherRule, bool moving, int average_slot, int square_slot, int step_scalar>
struct Unnamed {
  using Rule = OtherRule;
  static constexpr bool moves = moving;
  static constexpr int average = average_slot;
  static constexpr int square = square_slot;

  // Precondition: the scalars are all of one type, as rules have them.
  template <class Real>
  GPUOPT_INLINE static void set_step_size(typename Rule::template Scalars<Real>& scalars,
                                          Real step_size) {
    reinterpret_cast<Real*>(&scalars)[step_scalar] = step_size;
  }
};

// Of how many steps there are sums for one. Mirrors `STRIDE` in gpuopt/rules/catch_up.py.
constexpr int sums_stride = 4;

// The sums of the steps that a row has missed.
template <class Real>
struct MissedSteps {
  Real first, second, third, bound;
};

// Makes the sums of a step from those of the next one, and this one's step size. Mirrors
// `OneEarlier` in gpuopt/rules/catch_up.py.
template <class Real>
struct OneEarlier {
  Real ratio, excess, bound;

  GPUOPT_INLINE MissedSteps<Real> sums(const MissedSteps<Real>& later, Real step_size) const {
    const Real first = step_size + later.first;
    const Real growth = Real(1) + excess;
    const Real second = growth * later.second + excess * first;
    const Real third = growth * later.third + excess * later.second;
    return {ratio * first, ratio * second, ratio * (growth * third + excess * second),
            absolute(ratio) * (later.bound + absolute(step_size) * bound)};
  }
};

// Returns the number of the sums from which those of a row follow that has made `last` steps.
GPUOPT_INLINE unsigned int next_sums(unsigned int last) {
  return (last + sums_stride - 1) / sums_stride;
}

// Makes the next sums those of a row that has made `last` steps of `now`.
template <class Real, class StepSizeOf>
GPUOPT_INLINE void go_back(MissedSteps<Real>& sums, int last, int now,
                           const OneEarlier<Real>& one_earlier, const StepSizeOf& step_size_of) {
  for (int made = static_cast<int>(next_sums(last) * sums_stride); made > last; --made) {
    if (made <= now) sums = one_earlier.sums(sums, step_size_of(made - 1));
  }
}

// Writes by how much missed steps move an element, and returns whether this is close enough. It is
// not where a number is not finite: the rule makes infinity NaN.
template <class Real>
GPUOPT_INLINE bool movement(const MissedSteps<Real>& missed, Real average, Real square,
                            Real epsilon, Real tolerance, Real& move) {
  const Real inverse = Real(1) / (square_root(square) + epsilon);
  const Real part = epsilon * inverse;
  const Real series = missed.first - part * (missed.second - part * missed.third);
  move = average * inverse * series;
  const Real left_out = part * part * part * missed.bound;
  const bool is_finite = (average + square + inverse + series) * Real(0) == Real(0);
  const bool is_close = left_out <= tolerance * absolute(missed.first);
  return is_finite & (is_close | (average == Real(0)));
}

}  // namespace gpuopt
