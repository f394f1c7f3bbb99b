// What the block does that is done last: it sees what all blocks have written, and nobody waits.
#pragma once

namespace gpuopt {

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
