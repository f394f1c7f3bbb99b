// Finds where each run of equal rows begins, among sorted rows. As in sort_rows.cu, each block has
// a share of the rows.
#include "grid.cuh"
#include "runs.cuh"

namespace gpuopt {

constexpr int find_threads = 256;
constexpr int rounds_of_warp = 8;
constexpr int rows_of_warp = warp_size * rounds_of_warp;
constexpr int find_tile = find_threads * rounds_of_warp;

// Which lanes' rows begin a run: a warp looks at consecutive rows, from `first` on.
template <class Key>
__device__ __forceinline__ unsigned int lanes_that_begin(const Key* keys, long long first,
                                                         long long end) {
  const long long i = first + threadIdx.x % warp_size;
  return __ballot_sync(whole_warp, i < end && (i == 0 || keys[i] != keys[i - 1]));
}

// counts[share] becomes the number of runs that begin in the share.
template <class Key>
__global__ void __launch_bounds__(find_threads)
    count_runs(const Key* __restrict__ keys, long long num_rows, unsigned int* counts,
               long long num_shares, long long rows_per_share,
               const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const int warp = threadIdx.x / warp_size;
  for (long long share = blockIdx.x; share < num_shares; share += gridDim.x) {
    const Range rows(share, rows_per_share, num_rows);
    unsigned int of_warp = 0;
    for (long long tile = rows.begin; tile < rows.end; tile += find_tile) {
      const long long first = tile + warp * rows_of_warp;
#pragma unroll
      for (int round = 0; round < rounds_of_warp; ++round) {
        of_warp += __popc(lanes_that_begin(keys, first + round * warp_size, rows.end));
      }
    }
    unsigned int all;
    sum_before(threadIdx.x % warp_size == 0 ? of_warp : 0, &all);
    if (threadIdx.x == 0) counts[share] = all;
  }
}

// Writes where each run begins, with `num_rows` at the end, how many there are, and the number of
// the run that each piece starts in. Where `touched` is given, the bit of each row that has a
// gradient is set in it.
template <class Key>
__global__ void __launch_bounds__(find_threads)
    write_runs(const Key* __restrict__ keys, long long num_rows,
               const unsigned int* __restrict__ counts, long long num_shares,
               long long rows_per_share, unsigned int* begins, unsigned int* num_runs,
               unsigned int* run_of_piece, unsigned int* touched, int marks_touched,
               const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const int lane = threadIdx.x % warp_size;
  const int warp = threadIdx.x / warp_size;
  const unsigned int lanes_to_mine = whole_warp >> (warp_size - 1 - lane);
  for (long long share = blockIdx.x; share < num_shares; share += gridDim.x) {
    unsigned int mine = 0;
    for (long long s = threadIdx.x; s < share; s += blockDim.x) mine += counts[s];
    unsigned int before_tile;
    sum_before(mine, &before_tile);

    const Range rows(share, rows_per_share, num_rows);
    for (long long tile = rows.begin; tile < rows.end; tile += find_tile) {
      const long long first = tile + warp * rows_of_warp;
      unsigned int begin_here[rounds_of_warp];
      unsigned int of_warp = 0;
#pragma unroll
      for (int round = 0; round < rounds_of_warp; ++round) {
        begin_here[round] = lanes_that_begin(keys, first + round * warp_size, rows.end);
        of_warp += __popc(begin_here[round]);
      }
      unsigned int of_tile;
      // Only the last lane brings something, so that each gets what the warps before have.
      unsigned int before = before_tile + sum_before(lane == warp_size - 1 ? of_warp : 0, &of_tile);
#pragma unroll
      for (int round = 0; round < rounds_of_warp; ++round) {
        const long long i = first + round * warp_size + lane;
        const unsigned int begun = before + __popc(begin_here[round] & lanes_to_mine);
        if (begin_here[round] >> lane & 1u) {
          begins[begun - 1] = static_cast<unsigned int>(i);
          if (marks_touched) atomicOr(&touched[keys[i] / 32], 1u << (keys[i] % 32));
        }
        if (i < rows.end && i % piece_size == 0) run_of_piece[i / piece_size] = begun - 1;
        if (i == num_rows - 1) {
          begins[begun] = static_cast<unsigned int>(num_rows);
          *num_runs = begun;
        }
        before += __popc(begin_here[round]);
      }
      before_tile += of_tile;
    }
  }
}

}  // namespace gpuopt
