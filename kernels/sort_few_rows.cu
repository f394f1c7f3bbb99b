// Sorts rows in one launch of one block, which keeps them in shared memory.
#include "shared/digits.cuh"

namespace gpuopt {

constexpr int few_rounds = few_rows / sort_threads;

// Does for up to few_rows rows what the kernels of sort_rows.cu do. Sorts by the digits of the
// lowest `key_bits` bits, which must be at least 1.
template <class Types>
__global__ void __launch_bounds__(sort_threads)
    sort_few_rows(const typename Types::Source* __restrict__ source, long long num_rows,
                  int key_bits, KeyOf<Types>* sorted_keys, unsigned int* sorted_positions,
                  const unsigned long long* __restrict__ refused) {
  using Key = KeyOf<Types>;
  __shared__ Next next;
  __shared__ Key keys[few_rows];
  __shared__ unsigned int positions[few_rows];
  const RowsOfThread<few_rounds> rows(0, num_rows);
  const unsigned long long is_refused = *refused;
  Pairs<Key, few_rounds> pairs(rows, source, nullptr);
  for (int shift = 0; shift < key_bits; shift += digit_bits) {
    count_by_warp(rows, pairs, shift, next);
    unsigned int total;
    find_places(next, sum_before(count_in_tile(next), &total));
    move_pairs(rows, pairs, shift, next, keys, positions);
    __syncthreads();
    pairs = Pairs<Key, few_rounds>(rows, keys, positions);
  }
  if (is_refused) return;
#pragma unroll
  for (int round = 0; round < few_rounds; ++round) {
    if (rows.has(round)) {
      sorted_keys[rows.row(round)] = pairs.keys[round];
      sorted_positions[rows.row(round)] = pairs.positions[round];
    }
  }
}

}  // namespace gpuopt
