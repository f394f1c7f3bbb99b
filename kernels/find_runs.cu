// Finds where each run of equal rows begins, among sorted rows.
#include "grid.cuh"
#include "runs.cuh"

namespace gpuopt {

constexpr int find_threads = 256;
constexpr int rows_per_thread = 8;
constexpr int find_tile = find_threads * rows_per_thread;

template <class Key>
__device__ __forceinline__ bool begins_run(const Key* keys, long long i) {
  return i == 0 || keys[i] != keys[i - 1];
}

// How many runs begin among a thread's rows, which start with `first`.
template <class Key>
__device__ __forceinline__ unsigned int runs_of_thread(const Key* keys, long long first,
                                                       long long num_rows) {
  unsigned int runs = 0;
  for (int k = 0; k < rows_per_thread; ++k) {
    if (first + k < num_rows) runs += begins_run(keys, first + k);
  }
  return runs;
}

// counts[tile] becomes the number of runs that begin in the tile.
template <class Key>
__global__ void __launch_bounds__(find_threads)
    count_runs(const Key* __restrict__ keys, long long num_rows, unsigned int* counts,
               long long num_tiles, const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const long long first = tile * find_tile + threadIdx.x * rows_per_thread;
    const unsigned int mine = runs_of_thread(keys, first, num_rows);
    unsigned int all;
    sum_before(mine, &all);
    if (threadIdx.x == 0) counts[tile] = all;
  }
}

// Writes where each run begins, with `num_rows` at the end, and the number of the run that each
// piece starts in. `offsets` are the counts, each replaced by the sum of those before.
// Where `touched` is given, the bit of each row that has a gradient is set in it.
template <class Key>
__global__ void __launch_bounds__(find_threads)
    write_runs(const Key* __restrict__ keys, long long num_rows,
               const unsigned int* __restrict__ offsets, long long num_tiles, unsigned int* begins,
               unsigned int* run_of_piece, unsigned int* touched, int marks_touched,
               const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const long long first = tile * find_tile + threadIdx.x * rows_per_thread;
    const unsigned int mine = runs_of_thread(keys, first, num_rows);
    unsigned int all;
    unsigned int next = offsets[tile] + sum_before(mine, &all);
    for (int k = 0; k < rows_per_thread; ++k) {
      const long long i = first + k;
      if (i >= num_rows) break;
      if (begins_run(keys, i)) {
        begins[next] = static_cast<unsigned int>(i);
        ++next;
        if (marks_touched) atomicOr(&touched[keys[i] / 32], 1u << (keys[i] % 32));
      }
      if (i % piece_size == 0) run_of_piece[i / piece_size] = next - 1;
      if (i == num_rows - 1) begins[next] = static_cast<unsigned int>(num_rows);
    }
  }
}

}  // namespace gpuopt
