// Finds the runs of equal rows among sorted ones. As in sort_rows.cu, each block has a share of the
// rows.
#include "shared/digits.cuh"
#include "shared/run_begins.cuh"

namespace gpuopt {

// counts[share] becomes the number of runs that begin in the share. `group_counts` becomes 0, for
// the next sort; also if this one is refused, lest the counts of a part of it stay there.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    count_runs(const Key* __restrict__ keys, const Shares shares, unsigned int* counts,
               unsigned int* group_counts, const unsigned long long* __restrict__ refused) {
  clear(group_counts, shares.num_groups() * num_digits);
  const unsigned long long is_refused = *refused;
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range range = shares.rows_of(share);
    unsigned int warp_runs = 0;
#pragma unroll 1
    for (long long tile = range.begin; tile < range.end; tile += tile_size) {
      warp_runs += RunBegins<Key, rounds_per_tile>(keys, tile, range.end).count();
    }
    unsigned int all;
    sum_before(threadIdx.x % warp_size == 0 ? warp_runs : 0, &all);
    if (is_refused) return;
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
  const FoundRuns runs = {begins, num_runs, run_of_piece, touched, shares.num_rows};
  const unsigned long long is_refused = *refused;
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range range = shares.rows_of(share);
    RunBegins<Key, rounds_per_tile> found(keys, range.begin, range.end);
    unsigned int mine = 0;
    for (long long s = threadIdx.x; s < share; s += blockDim.x) mine += counts[s];
    unsigned int before;
    sum_before(mine, &before);
    if (is_refused) return;
    for (long long tile = range.begin;;) {
      before = write_tile(found, before, runs);
      tile += tile_size;
      if (tile >= range.end) break;
      found = RunBegins<Key, rounds_per_tile>(keys, tile, range.end);
    }
  }
}

}  // namespace gpuopt
