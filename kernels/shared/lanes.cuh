// Threads that work on one row together.
#pragma once
#include "grid.cuh"

namespace gpuopt {

// How many threads share a row of so many elements or packs.
__device__ __forceinline__ int lanes_per_row(long long parts) {
  int lanes = 1;
  while (lanes < warp_size && lanes < parts) lanes *= 2;
  return lanes;
}

// Threads that work on one position or piece together, along a row: each takes every num_lanes-th
// element, or pack of them.
struct Lanes {
  long long group;       // the number of the position or piece that they begin with
  long long num_groups;  // how many of them all threads work on at once
  int lane;
  int num_lanes;

  // Precondition: lanes_per_row is a power of 2, and at most a warp.
  __device__ __forceinline__ explicit Lanes(int lanes_per_row) {
    const int shift = __ffs(lanes_per_row) - 1;
    num_lanes = lanes_per_row;
    group = first_item() >> shift;
    num_groups = items_per_pass() >> shift;
    lane = static_cast<int>(threadIdx.x) & (lanes_per_row - 1);
  }
};

// The threads of a warp that are the lanes of one row.
__device__ __forceinline__ unsigned int mask_of(const Lanes& lanes) {
  const unsigned int first = threadIdx.x % warp_size - lanes.lane;
  return (whole_warp >> (warp_size - lanes.num_lanes)) << first;
}

}  // namespace gpuopt
