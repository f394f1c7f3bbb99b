// Chunks of variables that are updated together, and the scalars of the groups they belong to.
#pragma once
#include "rule.cuh"
#include "update.cuh"

namespace gpuopt {

constexpr int dense_threads = 256;

// Returns the scalars of the group of a variable, given its number. `groups` holds the number of
// each variable's group. A clipped rule has the number of a norm in the place of the factor.
template <class Rule, class Storage>
__device__ __forceinline__ Scalars<Rule, Storage> given_scalars(
    unsigned int variable, const long long* groups, const FewScalarsOf<Rule, Storage>& few_scalars,
    const Scalars<Rule, Storage>* many_scalars) {
  const long long group = __ldg(&groups[variable]) + first_group(few_scalars);
  return many_scalars == nullptr ? few_scalars.of[group] : many_scalars[group];
}

// The same, with the factor.
template <class Rule, class Storage>
__device__ __forceinline__ Scalars<Rule, Storage> scalars_of_group(
    unsigned int variable, const long long* groups, const FewScalarsOf<Rule, Storage>& few_scalars,
    const Scalars<Rule, Storage>* many_scalars) {
  if constexpr (Rule::is_clipped) {
    return with_factor<Rule, Storage>(
        given_scalars<Rule, Storage>(variable, groups, few_scalars, many_scalars), few_scalars);
  } else {
    return given_scalars<Rule, Storage>(variable, groups, few_scalars, many_scalars);
  }
}

}  // namespace gpuopt
