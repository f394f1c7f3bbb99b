// How many slots of rows and sums a rule has, and of which degree these are: none unless its
// functor says so. Compiles as CUDA and as plain C++17, as rules do.
#pragma once

namespace gpuopt {

template <class Rule>
constexpr int count_row_slots(const decltype(Rule::num_row_slots)*) {
  return Rule::num_row_slots;
}
template <class Rule>
constexpr int count_row_slots(...) {
  return 0;
}

// How many of a rule's slots, the last ones, are slots of rows.
template <class Rule>
constexpr int num_row_slots = count_row_slots<Rule>(nullptr);

template <class Rule>
constexpr int count_sums(const decltype(Rule::num_sums)*) {
  return Rule::num_sums;
}
template <class Rule>
constexpr int count_sums(...) {
  return 0;
}

// How many of a rule's scalars are sums over its variable.
template <class Rule>
constexpr int num_sums = count_sums<Rule>(nullptr);

template <class Rule>
constexpr int find_degree(int sum, const decltype(Rule::degree(0))*) {
  return Rule::degree(sum);
}
template <class Rule>
constexpr int find_degree(int, ...) {
  return -1;
}

// The degree of one of a rule's sums in the gradient: `degree(sum)` of its functor, if it is over
// the variable and the gradient alone. Below 0 if there is none.
template <class Rule>
constexpr int degree_of(int sum) {
  return find_degree<Rule>(sum, nullptr);
}

}  // namespace gpuopt
