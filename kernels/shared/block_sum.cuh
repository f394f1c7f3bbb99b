// A sum over the threads of a block.
#pragma once

namespace gpuopt {

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

}  // namespace gpuopt
