// Runs of equal rows among sorted ones, and the sum of a run's gradients in their given order.
//
// A run of up to long_run occurrences is summed from its first to its last. A longer one is cut
// where sorted positions are multiples of piece_size; its pieces are summed apart, and then added
// up in order. So the order depends on the rows alone, never on the launch.
#pragma once
#include "update.cuh"

namespace gpuopt {

// Mirrors `SortedRows` in gpuopt/backends/cuda/structs.py. Kernels read its arrays with __ldg: of a
// pointer in a struct, the compiler cannot know that nothing writes to the memory.
template <class Key>
struct SortedRows {
  const Key* keys;                   // the rows in ascending order, [num_rows]
  const unsigned int* positions;     // where each row stands in the gradient, [num_rows]
  const unsigned int* begins;        // where each run begins, and num_rows after the last one
  const unsigned int* num_runs;      // how many runs there are, [1]
  const unsigned int* run_of_piece;  // the run that each piece starts in
  long long num_rows;
};

constexpr int piece_size = 32;
// A longer run has a part in at least two pieces.
constexpr int long_run = 2 * piece_size;

// Rows whose bits share an element of an array that has a bit for each row of a variable.
constexpr int rows_per_word = 32;

__device__ __forceinline__ unsigned long long word_of(unsigned long long row) {
  return row / rows_per_word;
}

__device__ __forceinline__ unsigned int bit_of(unsigned long long row) {
  return 1u << row % rows_per_word;
}

__device__ __forceinline__ bool is_long(unsigned int begin, unsigned int end) {
  return end - begin > long_run;
}

// Adds the gradients of sorted positions from `begin` to `end`, for the columns from `column` on.
// Loads rows_in_flight of them at once, which takes registers for as many, and waits for all.
template <int rows_in_flight, class Storage, int count>
__device__ __forceinline__ void sum_gradients(const Storage* __restrict__ grad,
                                              const unsigned int* __restrict__ positions,
                                              unsigned int begin, unsigned int end,
                                              long long row_width, long long column,
                                              Compute<Storage> (&sum)[count]) {
  for (int i = 0; i < count; ++i) sum[i] = 0;
  for (unsigned int first = begin; first < end; first += rows_in_flight) {
    // Past the end, the last row is loaded again, so that no load depends on a condition.
    const Storage* at[rows_in_flight];
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      const unsigned int i = first + k < end ? first + k : end - 1;
      at[k] = grad + __ldg(&positions[i]) * row_width + column;
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

// Where in `parts` the sum over a long run's positions in one piece is stored. A piece has room for
// two: one run may go on from the piece before, and another may begin and go on in the next piece.
__device__ __forceinline__ long long part_number(unsigned int piece, unsigned int run_begin) {
  const bool begins_inside = run_begin > piece * piece_size;
  return 2ll * piece + (begins_inside ? 1 : 0);
}

// How many numbers of the compute type are stored at once, of `count` columns: one, or a pack.
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
