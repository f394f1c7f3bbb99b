// How blocks divide the rows that they sort: each block has a share of consecutive rows, and goes
// through it tile by tile.
#pragma once
#include "grid.cuh"
#include "structs.cuh"

namespace gpuopt {

constexpr int sort_warps = sort_threads / warp_size;
// Rows of a tile for each thread. A warp's are consecutive, 32 in each round.
constexpr int rounds_per_tile = tile_size / sort_threads;

// Rows from `begin` to `end`.
struct Range {
  long long begin;
  long long end;
};

__device__ __forceinline__ Range rows_of(const Shares& shares, long long share) {
  const long long begin = share * shares.rows_per_share;
  const long long end = begin + shares.rows_per_share;
  return {begin, end < shares.num_rows ? end : shares.num_rows};
}

__device__ __forceinline__ long long num_groups_of(const Shares& shares) {
  return (shares.num_shares + shares_per_group - 1) / shares_per_group;
}

// Those rows of a tile that are this thread's: in each round one, warp_size after the one before.
template <int rounds>
struct RowsOfThread {
  long long first;  // its row in the first round
  long long end;    // after the last row that there is

  __device__ __forceinline__ RowsOfThread(long long tile, long long rows_end) {
    const int warp = threadIdx.x / warp_size;
    first = tile + warp * (warp_size * rounds) + threadIdx.x % warp_size;
    end = rows_end;
  }

  __device__ __forceinline__ long long row(int round) const { return first + round * warp_size; }

  __device__ __forceinline__ bool has(int round) const { return row(round) < end; }

  // The row of a round, or the last one there is: so that a load need not wait for a condition,
  // and those of all rounds are in flight together.
  __device__ __forceinline__ long long row_to_load(int round) const {
    return has(round) ? row(round) : end - 1;
  }
};

}  // namespace gpuopt
