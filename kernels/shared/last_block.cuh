// What the block does that is done last: it sees what all blocks have written, and nobody waits.
#pragma once

namespace gpuopt {

// Returns whether all other blocks have called this before. Every thread of each block must call
// it, after thread 0 has written, or has waited for those that have. `num_done` is 0 before and
// after the launch.
__device__ __forceinline__ bool is_last_block(unsigned int* num_done) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(num_done, 1u) == gridDim.x - 1;
    if (is_last) atomicExch(num_done, 0u);
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

}  // namespace gpuopt
