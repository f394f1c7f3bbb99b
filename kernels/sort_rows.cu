// Sorts (row, position) pairs by row: a stable radix sort, from the least significant digit on.
//
// Each digit takes two launches. In the first, each block counts the digits in its share of the
// pairs. In the second, each block adds up the counts that it needs from other shares, and moves
// its own pairs. So no block waits for another one of its launch.
#include "shared/digits.cuh"
#include "shared/row_check.cuh"

namespace gpuopt {

// counts[share * num_digits + digit] becomes the number of the share's keys with that digit, which
// is also added to group_counts[group * num_digits + digit], and so must begin as 0.
// `next_group_counts`, of the same size, becomes 0, for the next digit. Calls check(key) for each
// key.
template <class Key, class Check>
__device__ __forceinline__ void count_in_shares(const Key* __restrict__ keys, const Shares& shares,
                                                int shift, unsigned int* counts,
                                                unsigned int* group_counts,
                                                unsigned int* next_group_counts,
                                                const unsigned long long is_refused, Check check) {
  __shared__ unsigned int share_counts[num_digits + 1];  // the last: of rows that are not there
  clear(next_group_counts, num_groups_of(shares) * num_digits);
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range range = rows_of(shares, share);
    share_counts[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (long long tile = range.begin; tile < range.end; tile += tile_size) {
      const RowsOfThread<rounds_per_tile> rows(tile, range.end);
      Key key[rounds_per_tile];
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        key[round] = keys[rows.row_to_load(round)];
      }
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        check(key[round]);
        atomicAdd(&share_counts[rows.has(round) ? digit_of(key[round], shift) : num_digits], 1u);
      }
    }
    __syncthreads();
    if (is_refused) return;
    // No barrier: a thread clears for the next share only the count that it has read itself.
    const unsigned int count = share_counts[threadIdx.x];
    counts[share * num_digits + threadIdx.x] = count;
    if (count != 0) {
      atomicAdd(&group_counts[share / shares_per_group * num_digits + threadIdx.x], count);
    }
  }
}

template <class Key>
__global__ void __launch_bounds__(sort_threads)
    count_digits(const Key* __restrict__ keys, const Shares shares, int shift, unsigned int* counts,
                 unsigned int* group_counts, unsigned int* next_group_counts,
                 const unsigned long long* __restrict__ refused) {
  count_in_shares(keys, shares, shift, counts, group_counts, next_group_counts, *refused,
                  [](Key) {});
}

// Counts the first digit, and does what `check_rows` does. It counts also if rows are refused: the
// next digits clear the counts.
template <class Row>
__global__ void __launch_bounds__(sort_threads)
    check_and_count_digits(const Row* __restrict__ keys, const Shares shares, long long height,
                           long long variable, unsigned int* counts, unsigned int* group_counts,
                           unsigned int* next_group_counts, unsigned long long* refused) {
  count_in_shares(keys, shares, 0, counts, group_counts, next_group_counts, 0,
                  [&](Row row) { check_row(row, height, variable, refused); });
}

// Adds up the digit threadIdx.x in the counts of `num` shares or groups, from `first` on: in all of
// them, and in the first `num_earlier`. It loads up to `in_flight` at once, and adds no more.
template <int in_flight>
__device__ __forceinline__ void add_counts(const unsigned int* __restrict__ counts, long long first,
                                           long long num, long long num_earlier,
                                           unsigned int& in_all, unsigned int& in_earlier) {
  const int here = num < in_flight ? static_cast<int>(num) : in_flight;
  const int earlier_here = num_earlier < in_flight ? static_cast<int>(num_earlier) : in_flight;
  const unsigned int* at = counts + first * num_digits + threadIdx.x;
  unsigned int count[in_flight];
#pragma unroll
  for (int k = 0; k < in_flight; ++k) count[k] = at[(k < here ? k : here - 1) * num_digits];
#pragma unroll
  for (int k = 0; k < in_flight; ++k) {
    if (k < here) in_all += count[k];
    if (k < earlier_here) in_earlier += count[k];
  }
}

// The place of a share's first key whose digit is threadIdx.x.
__device__ __forceinline__ unsigned int first_place(const unsigned int* __restrict__ counts,
                                                    const unsigned int* __restrict__ group_counts,
                                                    const Shares& shares, long long share) {
  constexpr int in_flight = 8;
  const long long num_groups = num_groups_of(shares);
  const long long group = share / shares_per_group;
  const long long first_share = group * shares_per_group;
  unsigned int in_group = 0;
  unsigned int in_all = 0;
  unsigned int in_earlier = 0;
  add_counts<shares_per_group>(counts, first_share, shares.num_shares - first_share,
                               share - first_share, in_group, in_earlier);
  for (long long first = 0; first < num_groups; first += in_flight) {
    add_counts<in_flight>(group_counts, first, num_groups - first, group - first, in_all,
                          in_earlier);
  }
  unsigned int total;
  return sum_before(in_all, &total) + in_earlier;
}

// Moves each pair to its place. For the first digit, keys are the gradient's own rows, of a signed
// type, and `positions` is not read: a row's position is its index.
template <class Types>
__global__ void __launch_bounds__(sort_threads)
    move_rows(const typename Types::Source* __restrict__ keys,
              const unsigned int* __restrict__ positions, const Shares shares, int shift,
              const unsigned int* __restrict__ counts,
              const unsigned int* __restrict__ group_counts, KeyOf<Types>* sorted_keys,
              unsigned int* sorted_positions, const unsigned long long* __restrict__ refused) {
  using Key = KeyOf<Types>;
  __shared__ Next next;
  const unsigned long long is_refused = *refused;
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range range = rows_of(shares, share);
    RowsOfThread<rounds_per_tile> rows(range.begin, range.end);
    Pairs<Key, rounds_per_tile> pairs(rows, keys, positions);
    unsigned int place = first_place(counts, group_counts, shares, share);
    if (is_refused) return;
    for (long long tile = range.begin;;) {
      count_by_warp(rows, pairs, shift, next);
      place = find_places(next, place);
      move_pairs(rows, pairs, shift, next, sorted_keys, sorted_positions);
      __syncthreads();
      tile += tile_size;
      if (tile >= range.end) break;
      rows = RowsOfThread<rounds_per_tile>(tile, range.end);
      pairs = Pairs<Key, rounds_per_tile>(rows, keys, positions);
    }
  }
}

}  // namespace gpuopt
