// The gradient that a rule computes with: the given one, or a clipped one.
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

// For loops around rules that compute something of the gradient themselves.
template <class Rule, class Real>
GPUOPT_INLINE Real gradient_of(Real grad, const typename Rule::template Scalars<Real>& scalars) {
  if constexpr (is_clipped<Rule>) return Rule::gradient(grad, scalars);
  return grad;
}

}  // namespace gpuopt
