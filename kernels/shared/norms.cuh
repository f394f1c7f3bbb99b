// The sum of what blocks have added up, by the block that is done last, and what gradients are
// multiplied by.
#pragma once
#include "grid.cuh"
#include "math.cuh"
#include "squares.cuh"
#include "update.cuh"

namespace gpuopt {

// The smaller or larger of two numbers; NaN if one is.
template <class Real>
__device__ __forceinline__ Real lesser(Real x, Real y) {
  return x < y || x != x ? x : y;
}
template <class Real>
__device__ __forceinline__ Real greater(Real x, Real y) {
  return x > y || x != x ? x : y;
}

// The reciprocal of the smallest normal number. More has a subnormal one, which GPUs may take for
// 0, and is beyond every norm of this type's elements.
template <class Real>
constexpr Real largest_most = static_cast<Real>(sizeof(Real) == sizeof(float) ? 0x1p126 : 0x1p1022);

// What gradients of a norm are multiplied by, if `most` is allowed.
template <class Real>
__device__ __forceinline__ Real factor_of(Real norm, Real most, int form) {
  const Real one = Real(1);
  if (isinf(most)) return one;
  if (form == clip_tensorflow) {
    const bool is_reached = most <= largest_most<Real>;
    return (is_reached ? most * lesser(one / norm, one / most) : one) + (norm - norm);
  }
  if (form == clip_torch) return lesser(most / (norm + Real(1e-6)), one);
  return norm > most ? one / (norm / most) : one;
}

// Returns a norm and its factors, from the sum of squares of gradients as they came.
__device__ __forceinline__ ClipResult result_of(const ClipRule& rule, double sum, long long norm) {
  const double squares = sum * rule.unscale * rule.unscale / rule.num_copies;
  const double* every = reinterpret_cast<const double*>(rule.most_of);
  const double most = every == nullptr ? rule.only_most : every[norm];
  ClipResult result;
  result.unscale = rule.unscale;
  result.squares = squares;
  // As much as TensorFlow's sum can hold: beyond it, a norm is infinite.
  result.norm =
      rule.is_double ? sqrt(squares) : static_cast<double>(sqrtf(static_cast<float>(squares)));
  const double factor = factor_of(result.norm, most, rule.form);
  const float norm_of_floats = static_cast<float>(result.norm);
  // A norm of doubles may be more than a float holds.
  const bool is_held = !isinf(norm_of_floats) || isinf(result.norm);
  result.factor_of_floats =
      static_cast<double>(is_held ? factor_of(norm_of_floats, static_cast<float>(most), rule.form)
                                  : static_cast<float>(factor));
  result.factor_of_doubles = factor;
  return result;
}

// Returns the sum of the launch's parts of a norm to all threads of the block.
__device__ __forceinline__ double sum_parts(const ClipTotals& totals, const double* parts,
                                            long long num_parts, long long norm) {
  const long long* begins = reinterpret_cast<const long long*>(totals.begins);
  const long long number = norm - totals.first_norm;
  const long long end = begins == nullptr ? num_parts : begins[number + 1];
  const long long begin = begins == nullptr ? 0 : begins[number];
  double mine = 0;
  for (long long i = begin + threadIdx.x; i < end; i += clip_threads) mine += __ldcg(&parts[i]);
  return sum_of_block<clip_threads>(mine);
}

// See loss_scaling.cuh.
template <class Decision>
constexpr bool decides = true;
template <>
constexpr bool decides<NoDecision> = false;

__device__ __forceinline__ void note_bad(const NoDecision&, long long) {}
__device__ __forceinline__ void take_bad(const NoDecision&, double*, bool, bool) {}
__device__ __forceinline__ const ClipRule& unscaling(const NoDecision&, const ClipRule& rule) {
  return rule;
}
__device__ __forceinline__ double scaled(const NoDecision&, double bound, const ClipRule&) {
  return bound;
}
__device__ __forceinline__ void decide(const NoDecision&, const double*, bool) {}

// Adds up the sums of chunks in the block that is done last, and makes results of all sums, and
// decides, unless `results` is null. With a decision, what is wrong comes behind the sums. Every
// thread of the block must call it, after thread 0 has written to `parts`. Nobody waits for another
// block.
template <class Decision>
__device__ __forceinline__ void finish_sums(const double* parts, long long num_parts,
                                            const ClipTotals& totals, const ClipRule& rule,
                                            ClipResult* results, const Decision& decision) {
  if (!is_last_block(gridDim.x, reinterpret_cast<unsigned int*>(totals.num_done))) return;
  double* sums = reinterpret_cast<double*>(totals.sums);
  bool is_bad = false;
  for (long long norm = totals.first_norm; norm < totals.end_norm; ++norm) {
    const double sum = sum_parts(totals, parts, num_parts, norm);
    is_bad |= isnan(sum);
    if (threadIdx.x == 0) sums[norm] = (totals.is_first ? 0.0 : sums[norm]) + sum;
  }
  if (threadIdx.x == 0) take_bad(decision, sums + totals.num_norms, totals.is_first, is_bad);
  for (long long norm = threadIdx.x; totals.is_first && norm < totals.num_norms;
       norm += clip_threads) {
    if (norm < totals.first_norm || norm >= totals.end_norm) sums[norm] = 0;
  }
  if (results == nullptr) return;
  __syncthreads();
  const ClipRule& by = unscaling(decision, rule);
  bool is_unusable = false;
  for (long long norm = threadIdx.x; norm < totals.num_norms; norm += clip_threads) {
    const ClipResult result = result_of(by, sums[norm], norm);
    is_unusable |= isnan(result.factor_of_doubles);
    results[norm] = result;
  }
  if (!decides<Decision>) return;
  is_unusable = __syncthreads_or(is_unusable);
  if (threadIdx.x == 0) decide(decision, sums + totals.num_norms, is_unusable);
}

}  // namespace gpuopt
