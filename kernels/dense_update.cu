// Applies one rule to every element of many variables.
#include "shared/update.cuh"

namespace gpuopt {

constexpr int dense_threads = 256;

// Rows of the table, which has a column for each variable. The others are addresses of slots.
constexpr int size_row = 0;
constexpr int var_row = 1;

// How many gradients' addresses are passed by value: then a step uploads nothing.
constexpr int few_gradients = 5;
struct FewGradients {
  long long of[few_gradients];
};

// Elements of one variable that a block updates in one go. Mirrors `Chunk` in
// gpuopt/backends/cuda/structs.py.
struct Chunk {
  unsigned int variable;  // the number of the variable's column
  unsigned int number;    // among the chunks of the variable
};

// Updates the elements from `begin` to `end`, `count` at a time: one, or a pack. Precondition:
// there is a whole number of these.
template <class Rule, class Storage, int count>
__device__ __forceinline__ void update_range(const Target<Rule, Storage>& target,
                                             const Storage* grad, long long begin, long long end,
                                             const Scalars<Rule, Storage>& scalars) {
  for (long long i = begin + threadIdx.x * count; i < end; i += blockDim.x * count) {
    Elements<Storage, count> stored;
    load(grad + i, stored);
    State<Rule, Storage, count> state(target, i);
    Compute<Storage> gradient[count];
#pragma unroll
    for (int k = 0; k < count; ++k) gradient[k] = Compute<Storage>(stored.of[k]);
    state.update(gradient, scalars);
    state.store_to(target, i);
  }
}

// Updates chunks of `chunk_size` elements, a multiple of a pack. A variable's last one may have
// less. `grads` holds the address of each variable's gradient; if it is null, `few_grads` does.
// Precondition: no two variables share memory.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads)
    dense_update(const long long* __restrict__ table, long long num_variables,
                 const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
                 const long long* __restrict__ grads,
                 const __grid_constant__ FewGradients few_grads,
                 const __grid_constant__ Scalars<Rule, Storage> scalars,
                 const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  if (grads == nullptr) grads = few_grads.of;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const long long* column = table + chunk.variable;
    const long long begin = chunk.number * chunk_size;
    const long long size = column[size_row * num_variables];
    const long long end = begin + chunk_size < size ? begin + chunk_size : size;
    const Storage* grad = reinterpret_cast<const Storage*>(grads[chunk.variable]);
    const Target<Rule, Storage> target(column + var_row * num_variables, num_variables);

    long long packed_end = begin;
    if (target.is_pack_aligned() && is_pack_aligned(grad)) {
      packed_end = end - (end - begin) % pack_size<Storage>;
    }
    update_range<Rule, Storage, pack_size<Storage>>(target, grad, begin, packed_end, scalars);
    update_range<Rule, Storage, 1>(target, grad, packed_end, end, scalars);
  }
}

}  // namespace gpuopt
