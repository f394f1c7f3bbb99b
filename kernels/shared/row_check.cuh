// Rows that a variable does not have.
#pragma once

namespace gpuopt {

// Refuses a row that its variable does not have. The first thread to find one writes
// {1 + variable, row} to `refused`, which all later kernels of the call read.
__device__ __forceinline__ void check_row(long long row, long long height, long long variable,
                                          unsigned long long* refused) {
  if (row < 0 || row >= height) {
    const unsigned long long mine = static_cast<unsigned long long>(variable) + 1;
    if (atomicCAS(refused, 0ull, mine) == 0ull) {
      atomicExch(refused + 1, static_cast<unsigned long long>(row));
    }
  }
}

}  // namespace gpuopt
