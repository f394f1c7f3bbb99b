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

// How a rule's step depends on where the variable is: if it is `shifting`, by a decay alone, whose
// place among the scalars is `decay_scalar`; negative if there is none. Mirrors `Shift` in
// gpuopt/rules/shift.py.
template <bool shifting, int decay_scalar>
struct Shift {
  // Has a rule step a variable that is the sum of two numbers. The result is rounded once, where
  // the step allows it.
  template <class Rule, class Real>
  GPUOPT_INLINE static void apply(Real& var, Real rest, Real grad, Real* slot,
                                  const typename Rule::template Scalars<Real>& scalars) {
    if constexpr (shifting) {
      Rule::apply(rest, grad, slot, scalars);
      if constexpr (decay_scalar >= 0) {
        rest -= reinterpret_cast<const Real*>(&scalars)[decay_scalar] * var;
      }
      var += rest;
    } else {
      var += rest;
      Rule::apply(var, grad, slot, scalars);
    }
  }
};

// Of how many steps there are sums for one. Mirrors `STRIDE` in gpuopt/rules/catch_up.py.
constexpr int sums_stride = 4;

// The sums of the steps that a row has missed. They are of hundreds of terms, and all that a row
// moves by: so they are in float64, whatever rules compute in.
struct MissedSteps {
  double first, second, third, bound;
};

// Makes the sums of a step from those of the next one, and this one's step size. Mirrors
// `OneEarlier` in gpuopt/rules/catch_up.py.
struct OneEarlier {
  double ratio, excess, bound;

  GPUOPT_INLINE MissedSteps sums(const MissedSteps& later, double step_size) const {
    const double first = step_size + later.first;
    const double growth = 1 + excess;
    const double second = growth * later.second + excess * first;
    const double third = growth * later.third + excess * later.second;
    return {ratio * first, ratio * second, ratio * (growth * third + excess * second),
            absolute(ratio) * (later.bound + absolute(step_size) * bound)};
  }
};

// Returns the number of the sums from which those of a row follow that has made `last` steps.
GPUOPT_INLINE unsigned int next_sums(unsigned int last) {
  return (last + sums_stride - 1) / sums_stride;
}

// Makes the next sums those of a row that has made `last` steps of `now`.
template <class StepSizeOf>
GPUOPT_INLINE void go_back(MissedSteps& sums, int last, int now, const OneEarlier& one_earlier,
                           const StepSizeOf& step_size_of) {
  for (int made = static_cast<int>(next_sums(last) * sums_stride); made > last; --made) {
    if (made <= now) sums = one_earlier.sums(sums, step_size_of(made - 1));
  }
}

// A power of a slot's decay, and what its rounding takes from it: each time that a row misses as
// many steps, this would be the same error.
template <class Real>
struct Decay {
  Real power, rest;

  GPUOPT_INLINE static Decay of(double exact) {
    const Real power = static_cast<Real>(exact);
    return {power, static_cast<Real>(exact - power)};
  }

  // Returns what is left of a slot; infinity stays.
  GPUOPT_INLINE Real operator()(Real slot) const {
    const bool is_finite = slot - slot == Real(0);
    return with_rest(slot, is_finite ? slot * rest : Real(0));
  }

  // Returns what is left of a slot that is finite.
  GPUOPT_INLINE Real of_finite(Real slot) const { return with_rest(slot, slot * rest); }

  GPUOPT_INLINE Real with_rest(Real slot, Real slot_rest) const {
    // Of float64, nothing is left.
    return sizeof(Real) == sizeof(double) ? slot * power : fused(slot, power, slot_rest);
  }
};

// Moves an element by missed steps, and returns whether this is close enough. It is not where a
// number is not finite: the rule makes infinity NaN. If not, `var` and `rest` are of no use.
//
// Rounded like any other, each number would be as far off as the element is rounded when it is
// written. So what each rounding takes is kept beside the number, and for the element in `rest`: it
// is rounded once, when it is written.
template <class Real>
GPUOPT_INLINE bool moved(const MissedSteps& missed, Real average, Real square, Real epsilon,
                         Real tolerance, Real& var, Real& rest) {
  const Real root = square_root(square);
  const Real divisor = root + epsilon;
  const Real inverse = Real(1) / divisor;
  const Real divisor_rest =
      fused(Real(0.5) * inverse, fused(-root, root, square), epsilon - (divisor - root));

  const Real quotient = average * inverse;
  const Real remainder = fused(-quotient, divisor, average);
  const Real quotient_rest = fused(-quotient, divisor_rest, remainder) * inverse;

  const Real first = static_cast<Real>(missed.first);
  const Real first_rest = static_cast<Real>(missed.first - first);
  const Real part = epsilon * inverse;
  const Real others = part * fused(-part, static_cast<Real>(missed.third),  //
                                   static_cast<Real>(missed.second));
  const Real series = first - others;
  const Real series_rest = first_rest + ((first - series) - others);

  const Real move = quotient * series;
  const Real move_rest = fused(quotient, series_rest, fused(quotient, series, -move));
  const Real after = var - move;
  const Real difference = after - var;
  const Real after_rest = (var - (after - difference)) - (move + difference);
  const Real all_rest = fused(-quotient_rest, series, after_rest) - move_rest;

  const Real left_out = part * part * part * static_cast<Real>(missed.bound);
  const bool is_close = left_out <= tolerance * absolute(first);
  const bool is_finite = (after + all_rest) * Real(0) == Real(0);
  var = after;
  rest = all_rest;
  return is_finite & (is_close | (average == Real(0)));
}

}  // namespace gpuopt
