// Sorts (row, position) pairs by row: a stable radix sort, from the least significant digit on.
//
// A digit takes two launches. In the first, each block counts the digits in its share of the pairs;
// in the second, it adds up what it needs of all counts, and moves its share. So there must be few
// shares, of any size, and blocks only wait for the launch before.
#include "grid.cuh"

namespace gpuopt {

constexpr int digit_bits = 8;
constexpr int num_digits = 1 << digit_bits;
// Of one block, which goes through its share tile by tile.
constexpr int sort_threads = 256;
constexpr int sort_warps = sort_threads / warp_size;
constexpr int rounds_per_tile = 8;
constexpr int tile_size = sort_threads * rounds_per_tile;

template <class Key>
__device__ __forceinline__ unsigned int digit_of(Key key, int shift) {
  return static_cast<unsigned int>(key >> shift) % num_digits;
}

// Refuses rows that the variable does not have. The first block to find one writes
// {1 + variable, row} to `refused`, which all later kernels of the call read.
template <class Index>
__global__ void check_rows(const Index* __restrict__ rows, long long num_rows, long long height,
                           long long variable, unsigned long long* refused) {
  for (long long i = first_item(); i < num_rows; i += items_per_pass()) {
    const long long row = rows[i];
    if (row < 0 || row >= height) {
      const unsigned long long mine = static_cast<unsigned long long>(variable) + 1;
      if (atomicCAS(refused, 0ull, mine) == 0ull) {
        atomicExch(refused + 1, static_cast<unsigned long long>(row));
      }
    }
  }
}

// counts[share * num_digits + digit] becomes the number of the share's keys with that digit.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    count_digits(const Key* __restrict__ keys, long long num_rows, int shift, unsigned int* counts,
                 long long num_shares, long long rows_per_share,
                 const unsigned long long* __restrict__ refused) {
  __shared__ unsigned int of_share[num_digits];
  if (*refused) return;
  for (long long share = blockIdx.x; share < num_shares; share += gridDim.x) {
    const Range rows(share, rows_per_share, num_rows);
    of_share[threadIdx.x] = 0;
    __syncthreads();
    for (long long tile = rows.begin; tile < rows.end; tile += tile_size) {
#pragma unroll
      for (int round = 0; round < rounds_per_tile; ++round) {
        const long long i = tile + round * sort_threads + threadIdx.x;
        if (i < rows.end) atomicAdd(&of_share[digit_of(keys[i], shift)], 1u);
      }
    }
    __syncthreads();
    // Each thread looks at what it clears for the next share itself.
    counts[share * num_digits + threadIdx.x] = of_share[threadIdx.x];
  }
}

// Where a share's first key with digit number threadIdx.x goes.
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
// keys, 32 in each round, and knows how many came in earlier rounds. The first digit's keys are the
// rows as they were given, of a signed type, and their positions are not read but made.
template <class Source, class Key>
__global__ void __launch_bounds__(sort_threads)
    move_rows(const Source* __restrict__ keys, const unsigned int* __restrict__ positions,
              long long num_rows, int shift, const unsigned int* __restrict__ counts,
              long long num_shares, long long rows_per_share, Key* sorted_keys,
              unsigned int* sorted_positions, const unsigned long long* __restrict__ refused) {
  constexpr bool is_first = Source(-1) < Source(0);
  __shared__ unsigned int next[sort_warps][num_digits];
  if (*refused) return;
  const int lane = threadIdx.x % warp_size;
  const int warp = threadIdx.x / warp_size;
  const unsigned int lanes_before = (1u << lane) - 1;
  for (long long share = blockIdx.x; share < num_shares; share += gridDim.x) {
    const Range rows(share, rows_per_share, num_rows);
    unsigned int place = first_place(counts, num_shares, share);
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
        const unsigned int of_warp = next[w][threadIdx.x];
        next[w][threadIdx.x] = place;
        place += of_warp;
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
