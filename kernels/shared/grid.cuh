// Divides work among threads and blocks, and joins their results, so that any launch shape gives
// the same ones; no block waits for another.
#pragma once
#include "constants.cuh"

namespace gpuopt {

__device__ __forceinline__ long long first_item() {
  return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ long long items_per_pass() {
  return static_cast<long long>(gridDim.x) * blockDim.x;
}

// Sets `size` numbers to 0.
__device__ __forceinline__ void clear(unsigned int* numbers, long long size) {
  for (long long i = first_item(); i < size; i += items_per_pass()) numbers[i] = 0;
}

constexpr unsigned int whole_warp = 0xffffffffu;
constexpr int max_warps = 32;

// Returns the sum of `mine` over the block's earlier threads; `total` becomes the sum over all.
// Every thread of the block must call it. Precondition: blocks are whole warps.
__device__ __forceinline__ unsigned int sum_before(unsigned int mine, unsigned int* total) {
  __shared__ unsigned int warp_sums[max_warps];
  const int lane = threadIdx.x % warp_size;
  const int warp = threadIdx.x / warp_size;
  unsigned int inclusive = mine;
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const unsigned int before = __shfl_up_sync(whole_warp, inclusive, distance);
    if (lane >= distance) inclusive += before;
  }
  if (lane == warp_size - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  unsigned int earlier_warps = 0;
  unsigned int all = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / warp_size; ++w) {
    if (w < warp) earlier_warps += warp_sums[w];
    all += warp_sums[w];
  }
  __syncthreads();  // before a next call writes warp_sums
  *total = all;
  return earlier_warps + inclusive - mine;
}

// Adds up a number of each thread, always in the same order; every thread of the block must call
// it. Returns the sum to all. Precondition: the block's threads are a power of 2, at most
// `most_threads`.
template <int most_threads, class Real>
__device__ __forceinline__ Real sum_of_block(Real mine) {
  __shared__ Real parts[most_threads];
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  const Real sum = parts[0];
  __syncthreads();  // before a next call writes to it
  return sum;
}

// Returns whether this is the last of `num_calls` calls, by any blocks. Every thread of a block
// must call it, after thread 0 has written, or has waited for those that have; a block that calls
// it again has a barrier in between. `num_done` is 0 before and after the launch.
__device__ __forceinline__ bool is_last_block(unsigned int num_calls, unsigned int* num_done) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(num_done, 1u) == num_calls - 1;
    if (is_last) atomicExch(num_done, 0u);
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

}  // namespace gpuopt
