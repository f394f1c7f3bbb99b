// Runs of equal rows among sorted ones, and the sum of a run's gradients in their given order.
//
// A run of up to long_run occurrences is summed from its first to its last. A longer one is cut
// where sorted positions are multiples of piece_size; its pieces are summed apart, and then added
// up in order. The pieces of a very long run are first added up by stretches, which are cut in the
// same way. So the order depends on the rows alone, never on the launch. If half of a million rows
// are the same, 32 + 64 + 244 additions follow one another, of which 8 loads each are in flight.
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
constexpr int stretch_size = 64 * piece_size;
// A longer run has a part in at least two stretches.
constexpr int very_long_run = 2 * stretch_size;

// Rows whose bits share an element of an array that has a bit for each row of a variable.
constexpr int rows_per_word = 32;

__device__ __forceinline__ unsigned long long word_of(unsigned long long row) {
  return row / rows_per_word;
}

__device__ __forceinline__ unsigned int bit_of(unsigned long long row) {
  return 1u << row % rows_per_word;
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
    for (int k = 0; k < rows_in_flight; ++k) load<Caching::evict_first>(at[k], gradients[k]);
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      if (first + k < end) {
#pragma unroll
        for (int i = 0; i < count; ++i) sum[i] += Compute<Storage>(gradients[k].of[i]);
      }
    }
  }
}

// How many numbers of the compute type are stored at once, of `count` columns: one, or a pack.
template <class Real, int count>
constexpr int part_pack = count == 1 ? 1 : pack_size<Real>;

// The sums of long runs' parts, [row_width] each. Each piece has room for two: one run may go on
// from the piece before, and another may begin and go on in the next piece. The parts of stretches
// come after those of all pieces, in the same way.
template <class Real>
struct Parts {
  Real* of_pieces;
  Real* of_stretches;
  long long row_width;

  __device__ __forceinline__ Parts(Real* parts, long long num_rows, long long width) {
    const long long num_pieces = (num_rows + piece_size - 1) / piece_size;
    of_pieces = parts;
    of_stretches = parts + 2 * num_pieces * width;
    row_width = width;
  }

  // The part, in the piece or stretch number `number`, of the run that begins at `run_begin`.
  template <int size>
  __device__ __forceinline__ Real* part(long long number, unsigned int run_begin) const {
    Real* parts = size == piece_size ? of_pieces : of_stretches;
    const bool begins_inside = run_begin > number * size;
    return parts + (2 * number + (begins_inside ? 1 : 0)) * row_width;
  }
};

template <class Real, int count>
__device__ __forceinline__ void store_part(Real* part, const Real (&sum)[count]) {
  constexpr int size = part_pack<Real, count>;
#pragma unroll
  for (int i = 0; i < count; i += size) {
    Elements<Real, size> some;
#pragma unroll
    for (int k = 0; k < size; ++k) some.of[k] = sum[i + k];
    store<Caching::normal>(part + i, some);
  }
}

// Adds up in order, for the columns from `column` on, the parts that a run has in the pieces or
// stretches of its sorted positions from `begin` to `end`.
template <int size, class Stored, class Real, int count>
__device__ __forceinline__ void sum_parts(const Parts<Stored>& parts, unsigned int run_begin,
                                          unsigned int begin, unsigned int end, long long column,
                                          Real (&sum)[count]) {
  constexpr int pack = part_pack<Real, count>;
  constexpr int packs = count / pack;
  constexpr int in_flight = packs == 1 ? 8 : 4;
  for (int i = 0; i < count; ++i) sum[i] = 0;
  const unsigned int last = (end - 1) / size;
#pragma unroll 1
  for (unsigned int first = begin / size; first <= last; first += in_flight) {
    // Past the end, the last part is loaded again, so that no load depends on a condition.
    Elements<Real, pack> some[in_flight][packs];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const unsigned int number = first + k < last ? first + k : last;
      const Real* part = parts.template part<size>(number, run_begin) + column;
#pragma unroll
      for (int p = 0; p < packs; ++p) load<Caching::normal>(part + p * pack, some[k][p]);
    }
    const unsigned int rest = last - first;
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (k <= rest) {
#pragma unroll
        for (int i = 0; i < count; ++i) sum[i] += some[k][i / pack].of[i % pack];
      }
    }
  }
}

}  // namespace gpuopt
