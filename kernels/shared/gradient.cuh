// What a rule says of itself to the loops around it: that it computes with a clipped gradient, has
// scalars of the device's own count, or is followed by an average.
#pragma once
#include "element.cuh"

namespace gpuopt {

template <class Rule>
constexpr bool clips(const decltype(Rule::is_clipped)*) {
  return true;
}
template <class Rule>
constexpr bool clips(...) {
  return false;
}

// Whether a rule clips its gradient.
template <class Rule>
constexpr bool is_clipped = clips<Rule>(nullptr);

template <class Rule>
constexpr bool scales(const decltype(Rule::is_scaled)*) {
  return true;
}
template <class Rule>
constexpr bool scales(...) {
  return false;
}

// Whether a rule's scalars depend on which steps the device has made.
template <class Rule>
constexpr bool is_scaled = scales<Rule>(nullptr);

template <class Rule>
constexpr bool averages(const decltype(Rule::is_averaged)*) {
  return true;
}
template <class Rule>
constexpr bool averages(...) {
  return false;
}

// Whether a rule moves an average of the variable, too.
template <class Rule>
constexpr bool is_averaged = averages<Rule>(nullptr);

template <class Rule>
constexpr bool rounds(const decltype(Rule::is_rounded)*) {
  return true;
}
template <class Rule>
constexpr bool rounds(...) {
  return false;
}

// Whether what a rule writes is rounded stochastically.
template <class Rule>
constexpr bool is_rounded = rounds<Rule>(nullptr);

// The number of the first slot that a rule has without an average, which is before these.
template <class Rule>
constexpr int first_own = is_averaged<Rule> ? 1 : 0;

// Has the average follow a variable, if the rule has one. Every loop calls it after `apply`, and
// after rounding, with the same slots and what it stores of the variable.
template <class Rule, class Real, class Scalars>
GPUOPT_INLINE void follow_variable(Real var, Real* slot, const Scalars& scalars) {
  if constexpr (is_averaged<Rule>) Rule::follow(var, slot, scalars);
}

// For loops around rules that compute something of the gradient themselves.
template <class Rule, class Real>
GPUOPT_INLINE Real gradient_of(Real grad, const typename Rule::template Scalars<Real>& scalars) {
  if constexpr (is_clipped<Rule>) return Rule::gradient(grad, scalars);
  return grad;
}

}  // namespace gpuopt
