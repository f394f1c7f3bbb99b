// Applies one rule to every element of many variables.
#include "update.cuh"

namespace gpuopt {

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
  using Real = Compute<Storage>;
  using Scalars = typename Rule::template Scalars<Real>;
  constexpr int pack_size = Pack<Storage>::size;
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
      packed_end = end - (end - begin) % pack_size;
    }
    for (long long i = begin + threadIdx.x * pack_size; i < packed_end;
         i += blockDim.x * pack_size) {
      Real gradient[pack_size];
      load_gradient(grad + i, gradient);
      update_elements(target, i, gradient, scalars);
    }
    for (long long i = packed_end + threadIdx.x; i < end; i += blockDim.x) {
      Real gradient[1];
      load_gradient(grad + i, gradient);
      update_elements(target, i, gradient, scalars);
    }
  }
}

}  // namespace gpuopt
