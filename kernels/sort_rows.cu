// Sorts (row, position) pairs by row: a stable radix sort, from the least significant digit on.
//
// Each digit takes two launches. In the first, each block counts the digits in its share of the
// pairs. In the second, each block adds up the counts that it needs from all shares, and moves its
// own pairs. So no block waits for another one of its launch; but there must be few shares, which
// may be of any size.
#include "shared/shares.cuh"

namespace gpuopt {

constexpr int digit_bits = 8;
constexpr int num_digits = 1 << digit_bits;

template <class Key>
__device__ __forceinline__ unsigned int digit_of(Key key, int shift) {
  return static_cast<unsigned int>(key >> shift) % num_digits;
}

// counts[share * num_digits + digit] becomes the number of the share's keys with that digit.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    count_digits(const Key* __restrict__ keys, const Shares shares, int shift, unsigned int* counts,
                 const unsigned long long* __restrict__ refused) {
  __shared__ unsigned int share_counts[num_digits];
  if (*refused) return;
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range rows = shares.rows_of(share);
    share_counts[threadIdx.x] = 0;
    __syncthreads();
    for (long long tile = rows.begin; tile < rows.end; tile += tile_size) {
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        const long long i = tile + round * sort_threads + threadIdx.x;
        if (i < rows.end) atomicAdd(&share_counts[digit_of(keys[i], shift)], 1u);
      }
    }
    __syncthreads();
    // No barrier: a thread clears for the next share only the count that it has read itself.
    counts[share * num_digits + threadIdx.x] = share_counts[threadIdx.x];
  }
}

// The place of a share's first key whose digit is threadIdx.x.
__device__ __forceinline__ unsigned int first_place(const unsigned int* __restrict__ counts,
                                                    long long num_shares, long long share) {
  unsigned int in_all = 0;
  unsigned int in_earlier = 0;
#pragma unroll 16
  for (long long s = 0; s < num_shares; ++s) {
    const unsigned int count = counts[s * num_digits + threadIdx.x];
    in_all += count;
    if (s < share) in_earlier += count;
  }
  unsigned int total;
  return sum_before(in_all, &total) + in_earlier;
}

// Moves each pair to its place among those with the same digit, in order. A warp takes consecutive
// keys, 32 in each round, and counts how many of each digit came in earlier rounds. For the first
// digit, keys are the gradient's own rows, of a signed type, and `positions` is not read: a row's
// position is its index.
template <class Source, class Key>
__global__ void __launch_bounds__(sort_threads)
    move_rows(const Source* __restrict__ keys, const unsigned int* __restrict__ positions,
              const Shares shares, int shift, const unsigned int* __restrict__ counts,
              Key* sorted_keys, unsigned int* sorted_positions,
              const unsigned long long* __restrict__ refused) {
  constexpr bool is_first = Source(-1) < Source(0);
  __shared__ unsigned int next[sort_warps][num_digits];
  if (*refused) return;
  const int lane = threadIdx.x % warp_size;
  const int warp = threadIdx.x / warp_size;
  const unsigned int lanes_before = (1u << lane) - 1;
  for (long long share = blockIdx.x; share < shares.num_shares; share += gridDim.x) {
    const Range rows = shares.rows_of(share);
    unsigned int place = first_place(counts, shares.num_shares, share);
    for (long long tile = rows.begin; tile < rows.end; tile += tile_size) {
      const long long first = tile + warp * (warp_size * rounds_per_tile) + lane;
      Key key[rounds_per_tile];
      unsigned int position[rounds_per_tile];
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        const long long i = first + round * warp_size;
        if (i < rows.end) {
          key[round] = static_cast<Key>(keys[i]);
          position[round] = is_first ? static_cast<unsigned int>(i) : positions[i];
        }
      }
      for (int w = 0; w < sort_warps; ++w) next[w][threadIdx.x] = 0;
      __syncthreads();
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        if (first + round * warp_size < rows.end) {
          atomicAdd(&next[warp][digit_of(key[round], shift)], 1u);
        }
      }
      __syncthreads();
      for (int w = 0; w < sort_warps; ++w) {
        const unsigned int warp_count = next[w][threadIdx.x];
        next[w][threadIdx.x] = place;
        place += warp_count;
      }
      __syncthreads();
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        const bool is_there = first + round * warp_size < rows.end;
        const unsigned int digit = is_there ? digit_of(key[round], shift) : num_digits;
        const unsigned int alike = __match_any_sync(whole_warp, digit);
        if (is_there) {
          const unsigned int mine = next[warp][digit] + __popc(alike & lanes_before);
          sorted_keys[mine] = key[round];
          sorted_positions[mine] = position[round];
        }
        __syncwarp();  // all have read `next`
        if (is_there && (alike & lanes_before) == 0) next[warp][digit] += __popc(alike);
        __syncwarp();
      }
      __syncthreads();
    }
  }
}

}  // namespace gpuopt
