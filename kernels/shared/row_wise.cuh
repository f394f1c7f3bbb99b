// Rules with slots of rows: one number for each row, and the mean of the row's squared gradients
// among the scalars. Compiles as CUDA and as plain C++17, as rules do.
#pragma once
#include "element.cuh"
#include "rule.cuh"

namespace gpuopt {

// A row-wise rule within one row: a rule of elements, for which the row's numbers are scalars.
template <class Rule>
struct OfRow : RuleDefaults {
  static constexpr int num_slots = Rule::num_slots - Rule::num_row_slots;
  static constexpr int num_averages = Rule::num_averages;
  static constexpr bool has_gradient_slots = Rule::has_gradient_slots;

  template <class Real>
  struct Scalars : Rule::template Scalars<Real> {
    Real row_slot[Rule::num_row_slots];
  };

  template <class Real>
  GPUOPT_INLINE static Real gradient(Real grad, unsigned long long number, Real* slot,
                                     const Scalars<Real>& s) {
    return Rule::gradient(grad, number, slot, s);
  }

  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
    Real every[Rule::num_slots];
    for (int k = 0; k < num_slots; ++k) every[k] = slot[k];
    for (int k = 0; k < Rule::num_row_slots; ++k) every[num_slots + k] = s.row_slot[k];
    Rule::apply(var, grad, every, s);
    for (int k = 0; k < num_slots; ++k) slot[k] = every[k];
  }

  template <class Real>
  GPUOPT_INLINE static void follow(Real var, Real* slot, const Scalars<Real>& s) {
    Rule::follow(var, slot, s);
  }

  // What the step makes of the row's own numbers: as from any element, they do not depend on it.
  template <class Real>
  GPUOPT_INLINE static void update_row_slots(Scalars<Real>& s) {
    Real var = 0;
    Real every[Rule::num_slots] = {};
    for (int k = 0; k < Rule::num_row_slots; ++k) every[num_slots + k] = s.row_slot[k];
    Rule::apply(var, Real(0), every, s);
    for (int k = 0; k < Rule::num_row_slots; ++k) s.row_slot[k] = every[num_slots + k];
  }
};

}  // namespace gpuopt
