// Runs of equal rows among sorted ones, and the sum of a run's gradients in their given order.
//
// A run of up to long_run occurrences is summed from its first to its last. A longer one is cut
// where sorted positions are multiples of piece_size; its pieces are summed apart, and then added
// up in order. So the order depends on the rows alone, never on the launch.
#pragma once
#include "update.cuh"

namespace gpuopt {

constexpr int piece_size = 128;
// A longer run has a part in at least two pieces.
constexpr int long_run = 2 * piece_size;

__device__ __forceinline__ bool is_long(unsigned int begin, unsigned int end) {
  return end - begin > long_run;
}

// Adds the gradients of sorted positions from `begin` to `end`, for the columns from `column` on.
template <class Storage, int count>
__device__ __forceinline__ void sum_gradients(const Storage* __restrict__ grad,
                                              const unsigned int* __restrict__ positions,
                                              unsigned int begin, unsigned int end,
                                              long long row_width, long long column,
                                              Compute<Storage> (&sum)[count]) {
  for (int i = 0; i < count; ++i) sum[i] = 0;
#pragma unroll 4
  for (unsigned int k = begin; k < end; ++k) {
    Compute<Storage> gradient[count];
    load_gradient(grad + positions[k] * row_width + column, gradient);
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] += gradient[i];
  }
}

// Where the sum of a long run's part in one piece is kept: a piece may hold the end (or middle) of
// a run that is already under way at its start, and the beginning of another that goes on after it.
__device__ __forceinline__ long long part_number(unsigned int piece, unsigned int run_begin) {
  const bool begins_inside = run_begin > piece * piece_size;
  return 2ll * piece + (begins_inside ? 1 : 0);
}

// Adds up the parts of a long run, in order.
template <class Real, int count>
__device__ __forceinline__ void sum_parts(const Real* __restrict__ parts, unsigned int begin,
                                          unsigned int end, long long row_width, long long column,
                                          Real (&sum)[count]) {
  for (int i = 0; i < count; ++i) sum[i] = 0;
  const unsigned int last = (end - 1) / piece_size;
#pragma unroll 4
  for (unsigned int piece = begin / piece_size; piece <= last; ++piece) {
    const Real* part = parts + part_number(piece, begin) * row_width + column;
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] += part[i];
  }
}

}  // namespace gpuopt
