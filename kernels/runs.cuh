// Runs of equal rows among sorted ones, and the sum of a run's gradients in their given order.
//
// A run of up to long_run occurrences is summed from its first to its last. A longer one is cut
// where sorted positions are multiples of piece_size; its pieces are summed apart, and then added
// up in order. So the order depends on the rows alone, never on the launch.
#pragma once
#include "update.cuh"

namespace gpuopt {

constexpr int piece_size = 32;
// A longer run has a part in at least two pieces.
constexpr int long_run = 2 * piece_size;

__device__ __forceinline__ bool is_long(unsigned int begin, unsigned int end) {
  return end - begin > long_run;
}

// Adds the gradients of sorted positions from `begin` to `end`, for the columns from `column` on.
// Waits for memory once for every rows_in_flight of them, which takes as many registers.
template <int rows_in_flight, class Storage, int count>
__device__ __forceinline__ void sum_gradients(const Storage* __restrict__ grad,
                                              const unsigned int* __restrict__ positions,
                                              unsigned int begin, unsigned int end,
                                              long long row_width, long long column,
                                              Compute<Storage> (&sum)[count]) {
  for (int i = 0; i < count; ++i) sum[i] = 0;
  for (unsigned int first = begin; first < end; first += rows_in_flight) {
    // Past the end, the last row is loaded again, so that no load waits for another's condition.
    const Storage* at[rows_in_flight];
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      const unsigned int i = first + k < end ? first + k : end - 1;
      at[k] = grad + positions[i] * row_width + column;
    }
    Elements<Storage, count> gradients[rows_in_flight];
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) load(at[k], gradients[k]);
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      if (first + k < end) {
#pragma unroll
        for (int i = 0; i < count; ++i) sum[i] += Compute<Storage>(gradients[k].of[i]);
      }
    }
  }
}

// Where the sum of a long run's part in one piece is kept: a piece may hold the end (or middle) of
// a run that is already under way at its start, and the beginning of another that goes on after it.
__device__ __forceinline__ long long part_number(unsigned int piece, unsigned int run_begin) {
  const bool begins_inside = run_begin > piece * piece_size;
  return 2ll * piece + (begins_inside ? 1 : 0);
}

// As many numbers of the compute type as there are columns at a time: one, or some packs.
template <class Real, int count>
constexpr int part_pack = count == 1 ? 1 : pack_size<Real>;

template <class Real, int count>
__device__ __forceinline__ void store_part(Real* part, const Real (&sum)[count]) {
  constexpr int size = part_pack<Real, count>;
#pragma unroll
  for (int i = 0; i < count; i += size) {
    Elements<Real, size> some;
#pragma unroll
    for (int k = 0; k < size; ++k) some.of[k] = sum[i + k];
    store(part + i, some);
  }
}

// Adds up the parts of a long run, in order.
template <class Real, int count>
__device__ __forceinline__ void sum_parts(const Real* __restrict__ parts, unsigned int begin,
                                          unsigned int end, long long row_width, long long column,
                                          Real (&sum)[count]) {
  constexpr int size = part_pack<Real, count>;
  for (int i = 0; i < count; ++i) sum[i] = 0;
  const unsigned int last = (end - 1) / piece_size;
#pragma unroll 8
  for (unsigned int piece = begin / piece_size; piece <= last; ++piece) {
    const Real* part = parts + part_number(piece, begin) * row_width + column;
#pragma unroll
    for (int i = 0; i < count; i += size) {
      Elements<Real, size> some;
      load(part + i, some);
#pragma unroll
      for (int k = 0; k < size; ++k) sum[i + k] += some.of[k];
    }
  }
}

}  // namespace gpuopt
