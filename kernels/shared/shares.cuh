// How blocks divide the rows that they sort: each block has a share of consecutive rows, and goes
// through it tile by tile.
#pragma once
#include "grid.cuh"

namespace gpuopt {

// Threads of a block that sorts rows or looks for runs.
constexpr int sort_threads = 256;
constexpr int sort_warps = sort_threads / warp_size;
constexpr int rounds_per_tile = 8;
constexpr int tile_size = sort_threads * rounds_per_tile;

// Rows from `begin` to `end`.
struct Range {
  long long begin;
  long long end;
};

// Mirrors `Shares` in gpuopt/backends/cuda/structs.py.
struct Shares {
  long long num_rows;
  long long num_shares;
  long long rows_per_share;

  __device__ __forceinline__ Range rows_of(long long share) const {
    const long long begin = share * rows_per_share;
    const long long end = begin + rows_per_share;
    return {begin, end < num_rows ? end : num_rows};
  }
};

}  // namespace gpuopt
