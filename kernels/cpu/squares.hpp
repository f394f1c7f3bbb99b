// Sums of squares in host memory, in the order of shared/squares.cuh.
#pragma once
#include <cstdint>

#include "../shared/squares.cuh"

namespace gpuopt {

template <class Real>
Real sum_chunk(const Real* values, long long size) {
  constexpr int places = 16 / sizeof(Real);
  constexpr int row = clip_threads * places;
  constexpr int block = 64;
  const long long rows_end = size / row * row;
  Real sums[row] = {};
  for (int column = 0; column < row; column += block) {
    Real mine[block] = {};  // in registers
    for (long long first = column; first < rows_end; first += row)
      for (int i = 0; i < block; ++i) mine[i] += values[first + i] * values[first + i];
    for (int i = 0; i < block; ++i) sums[column + i] = mine[i];
  }
  for (long long i = rows_end; i < size; ++i) sums[i - rows_end] += values[i] * values[i];
  Real lanes[clip_threads];
  for (int lane = 0; lane < clip_threads; ++lane) {
    Real of_lane[places];
    for (int k = 0; k < places; ++k) of_lane[k] = sums[lane * places + k];
    lanes[lane] = add_places(of_lane);
  }
  for (int half = clip_threads / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Consecutive elements of one array, at most clip_chunk.
template <class Real>
struct SquaredChunk {
  const Real* values;
  std::intptr_t size;
};

// Writes the sum of squares of each chunk until all are taken. Threads that call it at once share
// them; `taken` counts for all of them, from 0.
template <class Real>
void sum_chunks(const SquaredChunk<Real>* chunks, long long num_chunks, double* sums,
                long long* taken) {
  for (long long i; (i = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < num_chunks;)
    sums[i] = static_cast<double>(sum_chunk(chunks[i].values, chunks[i].size));
}

}  // namespace gpuopt
