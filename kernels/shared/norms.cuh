// The sum of what blocks have added up, by the block that is done last, and what gradients are
// multiplied by.
#pragma once
#include "block_sum.cuh"
#include "last_block.cuh"
#include "math.cuh"
#include "squares.cuh"
#include "update.cuh"

namespace gpuopt {

constexpr int clip_threads = square_lanes;

// The smaller or larger of two numbers; NaN if one is.
template <class Real>
__device__ __forceinline__ Real lesser(Real x, Real y) {
  return x < y || x != x ? x : y;
}
template <class Real>
__device__ __forceinline__ Real greater(Real x, Real y) {
  return x > y || x != x ? x : y;
}

// The formulas of factors. Mirrors `ClipForm` in gpuopt/backends/clips.py.
constexpr int clip_tensorflow = 0;
constexpr int clip_torch = 1;
constexpr int clip_apex = 2;

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

// How norms are made of sums. `most_of` has the most of each norm; if it is null, there is one norm
// that may be `only_most`. Mirrors `ClipRule` in gpuopt/backends/cuda/structs.py.
struct ClipRule {
  long long most_of;  // an address
  double only_most;
  double unscale;     // what gradients are multiplied by before all else
  double num_copies;  // how often each gradient comes
  int form;
  int is_double;  // else norms are rounded to float

  __device__ __forceinline__ ClipResult result(double scaled, long long norm) const {
    const double squares = scaled * unscale * unscale / num_copies;
    const double* every = reinterpret_cast<const double*>(most_of);
    const double most = every == nullptr ? only_most : every[norm];
    ClipResult result;
    result.squares = squares;
    // As much as TensorFlow's sum can hold: beyond it, a norm is infinite.
    result.norm =
        is_double ? sqrt(squares) : static_cast<double>(sqrtf(static_cast<float>(squares)));
    const double factor = factor_of(result.norm, most, form);
    const float norm_of_floats = static_cast<float>(result.norm);
    // A norm of doubles may be more than a float holds.
    const bool is_held = !isinf(norm_of_floats) || isinf(result.norm);
    result.factor_of_floats =
        static_cast<double>(static_cast<float>(unscale) *
                            (is_held ? factor_of(norm_of_floats, static_cast<float>(most), form)
                                     : static_cast<float>(factor)));
    result.factor_of_doubles = unscale * factor;
    return result;
  }
};

// Where the sums of one launch go: it adds to some norms, whose numbers follow each other. Mirrors
// `ClipTotals` in gpuopt/backends/cuda/structs.py.
struct ClipTotals {
  long long sums;        // the address of the sum of squares of each norm
  long long num_done;    // the address of how many blocks are done: 0 before and after the launch
  long long first_norm;  // the first number
  long long end_norm;    // the number after the last one
  long long begins;      // the address of where each one's parts begin, and the last ones end; 0:
                         // there is one norm
  long long num_norms;
  long long is_first;  // whether no launch before it has written sums

  // Returns the sum of the launch's parts of a norm to all threads of the block.
  __device__ __forceinline__ double sum_parts(const double* parts, long long num_parts,
                                              long long norm) const {
    const long long* of_norm = reinterpret_cast<const long long*>(begins) + (norm - first_norm);
    const long long end = begins == 0 ? num_parts : of_norm[1];
    double mine = 0;
    for (long long i = (begins == 0 ? 0 : of_norm[0]) + threadIdx.x; i < end; i += clip_threads) {
      mine += __ldcg(&parts[i]);
    }
    return sum_of_block<clip_threads>(mine);
  }
};

// For launches after which nothing is decided; `LossDecision` of loss_scaling.cuh is another.
struct NoDecision {
  static constexpr bool decides = false;

  __device__ __forceinline__ void note_bad(long long) const {}
  __device__ __forceinline__ void take_bad(double*, bool, bool) const {}
  __device__ __forceinline__ const ClipRule& unscaling(const ClipRule& rule) const { return rule; }
  __device__ __forceinline__ double scaled(double bound, const ClipRule&) const { return bound; }
  __device__ __forceinline__ void decide(const double*, bool) const {}
};

// Adds up the sums of chunks in the block that is done last, and makes results of all sums, and
// decides, unless `results` is null. With a decision, what is wrong comes behind the sums. Every
// thread of the block must call it, after thread 0 has written to `parts`. Nobody waits for another
// block.
template <class Decision = NoDecision>
__device__ __forceinline__ void finish_sums(const double* parts, long long num_parts,
                                            const ClipTotals& totals, const ClipRule& rule,
                                            ClipResult* results, const Decision& decision = {}) {
  if (!is_last_block(gridDim.x, reinterpret_cast<unsigned int*>(totals.num_done))) return;
  double* sums = reinterpret_cast<double*>(totals.sums);
  bool is_bad = false;
  for (long long norm = totals.first_norm; norm < totals.end_norm; ++norm) {
    const double sum = totals.sum_parts(parts, num_parts, norm);
    is_bad |= isnan(sum);
    if (threadIdx.x == 0) sums[norm] = (totals.is_first ? 0.0 : sums[norm]) + sum;
  }
  if (threadIdx.x == 0) decision.take_bad(sums + totals.num_norms, totals.is_first, is_bad);
  for (long long norm = threadIdx.x; totals.is_first && norm < totals.num_norms;
       norm += clip_threads) {
    if (norm < totals.first_norm || norm >= totals.end_norm) sums[norm] = 0;
  }
  if (results == nullptr) return;
  __syncthreads();
  const ClipRule& by = decision.unscaling(rule);
  bool is_unusable = false;
  for (long long norm = threadIdx.x; norm < totals.num_norms; norm += clip_threads) {
    const ClipResult result = by.result(sums[norm], norm);
    is_unusable |= isnan(result.factor_of_doubles);
    results[norm] = result;
  }
  if (!Decision::decides) return;
  is_unusable = __syncthreads_or(is_unusable);
  if (threadIdx.x == 0) decision.decide(sums + totals.num_norms, is_unusable);
}

}  // namespace gpuopt
