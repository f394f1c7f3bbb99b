// Runs of equal rows among sorted ones, and the sum of a run's gradients in their given order.
//
// No list says where runs begin: their keys tell. Sorted positions are cut into pieces of
// piece_size, and pieces into stretches. In the piece that it begins in, a run is summed from its
// first gradient to its last. What goes on in a next piece is summed apart, as that piece's part,
// and so are the parts of a stretch if the run has begun before it. To the first sum come the parts
// of the other pieces of its stretch, and then those of the next stretches. So the order depends on
// the rows alone, never on the launch. If half of a million rows are the same, 32 + 16 + 1,024
// additions follow one another, of which 8 loads each are in flight.
#pragma once
#include "update.cuh"

namespace gpuopt {

// Whether a position's run begins there. Both keys are in flight together. They are read with
// __ldg: of a pointer in a struct, the compiler cannot know that nothing writes to the memory.
template <class Key>
__device__ __forceinline__ bool begins_run(const SortedRows<Key>& rows, long long i) {
  const Key before = __ldg(&rows.keys[i > 0 ? i - 1 : 0]);
  return (i == 0) | (__ldg(&rows.keys[i]) != before);
}

// The end of the part of `size` positions that has a position.
template <int size, class Key>
__device__ __forceinline__ unsigned int end_of_part(const SortedRows<Key>& rows, unsigned int i) {
  const unsigned int end = i / size * size + size;
  return rows.num_rows < end ? static_cast<unsigned int>(rows.num_rows) : end;
}

// The element of an array with a bit for each row of a variable that has a row's bit.
__device__ __forceinline__ unsigned long long word_of(unsigned long long row) {
  return row / rows_per_word;
}

__device__ __forceinline__ unsigned int bit_of(unsigned long long row) {
  return 1u << row % rows_per_word;
}

// Sums the gradients of the run of `begin`, of sorted positions before `end`, for the columns from
// `column` on. Returns whether the run has all of these positions. Loads rows_in_flight of them at
// once, which takes registers for as many, and waits for all. A sum begins with -0, so that one of
// -0 alone is -0.
template <int rows_in_flight, class Storage, class Key, int count>
__device__ __forceinline__ bool sum_gradients(const Storage* __restrict__ grad,
                                              const SortedRows<Key>& rows, unsigned int begin,
                                              unsigned int end, long long row_width,
                                              long long column, Compute<Storage> (&sum)[count]) {
  const Key key = __ldg(&rows.keys[begin]);
  for (int i = 0; i < count; ++i) sum[i] = Compute<Storage>(-0.0);
#pragma unroll 1
  for (unsigned int first = begin; first < end; first += rows_in_flight) {
    // Past the end, the last position is read again, so that no load depends on a condition.
    unsigned int here = 0;  // how many of these positions are the run's
    unsigned int positions[rows_in_flight];
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      const unsigned int i = first + k < end ? first + k : end - 1;
      here += (first + k < end) & (__ldg(&rows.keys[i]) == key);
      positions[k] = __ldg(&rows.positions[i]);
    }
    if (here == 0) return false;
    // For what is not the run's, the first gradient is loaded again.
    Elements<Storage, count> gradients[rows_in_flight];
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      const unsigned int position = k < here ? positions[k] : positions[0];
      load<Caching::evict_first>(grad + position * row_width + column, gradients[k]);
    }
#pragma unroll
    for (int k = 0; k < rows_in_flight; ++k) {
      if (k < here) {
#pragma unroll
        for (int i = 0; i < count; ++i) sum[i] += Compute<Storage>(gradients[k].of[i]);
      }
    }
    if (here < rows_in_flight) return first + here == end;
  }
  return true;
}

// How many numbers of the compute type are stored at once, of `count` columns: one, or a pack.
template <class Real, int count>
constexpr int part_pack = count == 1 ? 1 : pack_size<Real>;

// The sums of runs' parts, [row_width] each: of every piece and of every stretch, the part of the
// run that goes on from the one before, if there is such a run.
template <class Real>
struct Parts {
  Real* of_pieces;
  Real* of_stretches;
  long long row_width;

  __device__ __forceinline__ Parts(Real* parts, long long num_rows, long long width) {
    const long long num_pieces = (num_rows + piece_size - 1) / piece_size;
    of_pieces = parts;
    of_stretches = parts + num_pieces * width;
    row_width = width;
  }

  template <int size>
  __device__ __forceinline__ Real* part(long long number) const {
    return (size == piece_size ? of_pieces : of_stretches) + number * row_width;
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

// Adds to `sum`, in order and for the columns from `column` on, the parts that the run of `key` has
// in the pieces or stretches that begin at sorted positions from `begin` to before `end`. Returns
// whether it has one in each of them.
template <int size, class Stored, class Key, class Real, int count>
__device__ __forceinline__ bool add_parts(const Parts<Stored>& parts, const SortedRows<Key>& rows,
                                          Key key, unsigned int begin, unsigned int end,
                                          long long column, Real (&sum)[count]) {
  constexpr int pack = part_pack<Real, count>;
  constexpr int packs = count / pack;
  constexpr int in_flight = packs == 1 ? 8 : 4;
  const unsigned int past_last = (end + size - 1) / size;
#pragma unroll 1
  for (unsigned int first = (begin + size - 1) / size; first < past_last; first += in_flight) {
    // Past the end, the last part is loaded again, so that no load depends on a condition; and so
    // are parts of another run, or of none.
    unsigned int here = 0;  // how many of these parts are the run's
    Elements<Real, pack> some[in_flight][packs];
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      const unsigned int number = first + k < past_last ? first + k : past_last - 1;
      here += (first + k < past_last) & (__ldg(&rows.keys[number * size]) == key);
      const Real* part = parts.template part<size>(number) + column;
#pragma unroll
      for (int p = 0; p < packs; ++p) load<Caching::normal>(part + p * pack, some[k][p]);
    }
#pragma unroll
    for (int k = 0; k < in_flight; ++k) {
      if (k < here) {
#pragma unroll
        for (int i = 0; i < count; ++i) sum[i] += some[k][i / pack].of[i % pack];
      }
    }
    if (here < in_flight) return first + here == past_last;
  }
  return true;
}

// Sums the gradients of the run that begins at `begin`, for the columns from `column` on.
template <class Storage, class Key, int count>
__device__ __forceinline__ void sum_run(const Storage* grad, const SortedRows<Key>& rows,
                                        const Parts<const Compute<Storage>>& parts,
                                        unsigned int begin, long long column,
                                        Compute<Storage> (&sum)[count]) {
  const Key key = __ldg(&rows.keys[begin]);
  const unsigned int piece_end = end_of_part<piece_size>(rows, begin);
  const unsigned int stretch_end = end_of_part<stretch_size>(rows, begin);
  const unsigned int end = static_cast<unsigned int>(rows.num_rows);
  if (sum_gradients<4>(grad, rows, begin, piece_end, parts.row_width, column, sum) &&
      add_parts<piece_size>(parts, rows, key, piece_end, stretch_end, column, sum)) {
    add_parts<stretch_size>(parts, rows, key, stretch_end, end, column, sum);
  }
}

}  // namespace gpuopt
