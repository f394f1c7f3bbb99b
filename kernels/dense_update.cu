// Applies one rule to every element of many variables.
#include "update.cuh"

namespace gpuopt {

// Updates the elements from `begin` to `end`; if several at a time, as many as make whole packs.
template <class Rule, class Storage, int count>
__device__ __forceinline__ void update_part(
    const Target<Rule, Storage>& target, const Storage* grad, long long begin, long long end,
    const typename Rule::template Scalars<Compute<Storage>>& scalars) {
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

// `table` has a column for each variable, and these rows: size, the gradient's address, the
// variable's, its slots'. Each block takes chunks of `chunk_size` elements, a multiple of a pack:
// chunk c is the part number chunks[2c + 1] of variable number chunks[2c].
// Precondition: no two variables share memory.
template <class Rule, class Storage>
__global__ void __launch_bounds__(256)
    dense_update(const long long* __restrict__ table, long long num_variables,
                 const unsigned int* __restrict__ chunks, long long num_chunks,
                 long long chunk_size, const Compute<Storage>* __restrict__ scalar_block,
                 const unsigned long long* __restrict__ refused) {
  using Scalars = typename Rule::template Scalars<Compute<Storage>>;
  if (*refused) return;
  const Scalars scalars = *reinterpret_cast<const Scalars*>(scalar_block);
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const long long* column = table + chunks[2 * c];
    const long long begin = chunks[2 * c + 1] * chunk_size;
    const long long size = column[0];
    const long long end = begin + chunk_size < size ? begin + chunk_size : size;
    const Storage* grad = reinterpret_cast<const Storage*>(column[num_variables]);
    const Target<Rule, Storage> target(column + 2 * num_variables, num_variables);

    long long packed_end = begin;
    if (target.is_pack_aligned() && is_pack_aligned(grad)) {
      packed_end = end - (end - begin) % pack_size<Storage>;
    }
    update_part<Rule, Storage, pack_size<Storage>>(target, grad, begin, packed_end, scalars);
    update_part<Rule, Storage, 1>(target, grad, packed_end, end, scalars);
  }
}

}  // namespace gpuopt
