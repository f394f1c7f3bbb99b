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

// The sums of the steps that a row has missed.
template <class Real>
struct MissedSteps {
  Real first, second, third, bound;
};

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
