// Sums over each variable, by the block that does the variable's last chunk: nobody waits.
#pragma once
#include "grid.cuh"
#include "scalars.cuh"

namespace gpuopt {

// Adds up the sums over a variable's chunks, from number `begin` to before `end`, in their order:
// in the block that is done with the last one, and nobody waits. `num_done` has how many are done:
// 0 before and after the launch. Returns whether it is this block, whose threads all get the sums.
// Called after thread 0 has written the sums over a chunk to `parts`, as `is_last_block` is.
template <int num_sums>
__device__ __forceinline__ bool add_up_chunks(const double* parts, long long begin, long long end,
                                              unsigned int* num_done, double (&sums)[num_sums]) {
  // The only chunk is the last one.
  const unsigned int num_chunks = static_cast<unsigned int>(end - begin);
  if (num_chunks > 1 && !is_last_block(num_chunks, num_done)) return false;
  // One sum after the other: side by side, they would take more registers than there are.
#pragma unroll
  for (int k = 0; k < num_sums; ++k) {
    double mine = 0;
    for (long long c = begin + threadIdx.x; c < end; c += blockDim.x) {
      mine += __ldcg(&parts[c * num_sums + k]);
    }
    sums[k] = sum_of_block<dense_threads>(mine);
  }
  return true;
}

// Where a kernel that goes through chunks writes what a rule sums over a variable. `first_chunks`
// holds the number of each variable's first chunk, and at the end the number of all chunks. `parts`
// is for the sums over each chunk, Program::num_sums of them. `num_done` has how many chunks of
// each variable are done: 0 before and after the launch. `of_variables` gets the scalars of each
// variable: those of its group, and the sums from number `first_sum` on.
template <class Program>
struct VariableSums {
  const long long* first_chunks;
  double* parts;
  unsigned int* num_done;
  int first_sum;
  ScalarsOf<Program>* of_variables;

  // Adds up the sums of each thread over a chunk, and after the variable's last one those over its
  // chunks, in their order. Every thread of the block must call it. The scalars are those of
  // `dense_update`. Precondition: the block's threads are a power of 2.
  __device__ __forceinline__ void finish_chunk(long long chunk, unsigned int variable,
                                               const RealOf<Program> (&mine)[Program::num_sums],
                                               const GroupScalars<Program>& scalars,
                                               const long long* groups) const {
    constexpr int num_sums = Program::num_sums;
#pragma unroll
    for (int k = 0; k < num_sums; ++k) {
      const RealOf<Program> sum = sum_of_block<dense_threads>(mine[k]);
      if (threadIdx.x == 0) parts[chunk * num_sums + k] = static_cast<double>(sum);
    }
    const long long begin = __ldg(&first_chunks[variable]);
    const long long end = __ldg(&first_chunks[variable + 1]);
    double of_variable[num_sums];
    if (!add_up_chunks(parts, begin, end, &num_done[variable], of_variable)) return;
    if (threadIdx.x != 0) return;
    of_variables[variable] = scalars.given(__ldg(&groups[variable]));
    RealOf<Program>* sums = reinterpret_cast<RealOf<Program>*>(of_variables + variable);
#pragma unroll
    for (int k = 0; k < num_sums; ++k) {
      sums[first_sum + k] = static_cast<RealOf<Program>>(of_variable[k]);
    }
  }
};

}  // namespace gpuopt
