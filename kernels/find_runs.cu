// Finds the runs of equal rows among sorted ones. As in sort_rows.cu, each block has a share of the
// rows.
#include "shared/runs.cuh"
#include "shared/shares.cuh"

namespace gpuopt {

// How many rows of a tile a warp looks at.
constexpr int rows_per_warp = warp_size * rounds_per_tile;

// Returns a mask of the lanes whose rows begin a run: a warp looks at 32 consecutive rows, from
// `first` on.
template <class Key>
__device__ __forceinline__ unsigned int lanes_that_begin(const Key* keys, long long first,
                                                         long long end) {
  const long long i = first + threadIdx.x % warp_size;
  return __ballot_sync(whole_warp, i < end && (i == 0 || keys[i] != keys[i - 1]));
}

// counts[share] becomes the number of runs that begin in the share.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    count_runs(const Key* __restrict__ keys, const Shares shares, unsigned int* counts,
               const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const int warp = threadIdx.x / warp_size;
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range rows = shares.rows_of(share);
    unsigned int warp_runs = 0;
    for (long long tile = rows.begin; tile < rows.end; tile += tile_size) {
      const long long first = tile + warp * rows_per_warp;
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        warp_runs += __popc(lanes_that_begin(keys, first + round * warp_size, rows.end));
      }
    }
    unsigned int all;
    sum_before(threadIdx.x % warp_size == 0 ? warp_runs : 0, &all);
    if (threadIdx.x == 0) counts[share] = all;
  }
}

// Writes what `SortedRows` says of runs. If `touched` is not null, the bit of each row that has a
// gradient is set in it.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    write_runs(const Key* __restrict__ keys, const Shares shares,
               const unsigned int* __restrict__ counts, unsigned int* begins,
               unsigned int* num_runs, unsigned int* run_of_piece, unsigned int* touched,
               const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const int lane = threadIdx.x % warp_size;
  const int warp = threadIdx.x / warp_size;
  const unsigned int lanes_to_mine = whole_warp >> (warp_size - 1 - lane);
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    unsigned int mine = 0;
    for (long long s = threadIdx.x; s < share; s += blockDim.x) mine += counts[s];
    unsigned int before_tile;
    sum_before(mine, &before_tile);

    const Range rows = shares.rows_of(share);
    for (long long tile = rows.begin; tile < rows.end; tile += tile_size) {
      const long long first = tile + warp * rows_per_warp;
      unsigned int begin_here[rounds_per_tile];
      unsigned int warp_runs = 0;
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        begin_here[round] = lanes_that_begin(keys, first + round * warp_size, rows.end);
        warp_runs += __popc(begin_here[round]);
      }
      unsigned int tile_runs;
      // Only the last lane adds its warp's runs, so that every lane gets those of earlier warps.
      unsigned int before =
          before_tile + sum_before(lane == warp_size - 1 ? warp_runs : 0, &tile_runs);
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        const long long i = first + round * warp_size + lane;
        const unsigned int begun = before + __popc(begin_here[round] & lanes_to_mine);
        if (begin_here[round] >> lane & 1u) {
          begins[begun - 1] = static_cast<unsigned int>(i);
          if (touched != nullptr) atomicOr(&touched[word_of(keys[i])], bit_of(keys[i]));
        }
        if (i < rows.end && i % piece_size == 0) run_of_piece[i / piece_size] = begun - 1;
        if (i == shares.num_rows - 1) {
          begins[begun] = static_cast<unsigned int>(shares.num_rows);
          *num_runs = begun;
        }
        before += __popc(begin_here[round]);
      }
      before_tile += tile_runs;
    }
  }
}

}  // namespace gpuopt
