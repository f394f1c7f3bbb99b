// Sorts (row, position) pairs by row: a stable radix sort, from the least significant digit on.
// Blocks only wait for the kernel before, so that any number of them may run at once.
#include "grid.cuh"

namespace gpuopt {

constexpr int digit_bits = 8;
constexpr int num_digits = 1 << digit_bits;
// Of one block. A tile's keys keep their order, so results do not depend on the launch.
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

// Makes the pairs that are sorted.
template <class Index, class Key>
__global__ void number_rows(const Index* __restrict__ rows, long long num_rows, Key* keys,
                            unsigned int* positions,
                            const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  for (long long i = first_item(); i < num_rows; i += items_per_pass()) {
    keys[i] = static_cast<Key>(rows[i]);
    positions[i] = static_cast<unsigned int>(i);
  }
}

// counts[digit * num_tiles + tile] becomes the number of the tile's keys with that digit.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    count_digits(const Key* __restrict__ keys, long long num_rows, int shift, unsigned int* counts,
                 long long num_tiles, const unsigned long long* __restrict__ refused) {
  __shared__ unsigned int of_tile[num_digits];
  if (*refused) return;
  for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    of_tile[threadIdx.x] = 0;
    __syncthreads();
    for (int round = 0; round < rounds_per_tile; ++round) {
      const long long i = tile * tile_size + round * sort_threads + threadIdx.x;
      if (i < num_rows) atomicAdd(&of_tile[digit_of(keys[i], shift)], 1u);
    }
    __syncthreads();
    counts[threadIdx.x * num_tiles + tile] = of_tile[threadIdx.x];
    __syncthreads();
  }
}

// Replaces each count by the sum of those before it. One block; returns the sum of all in `total`.
__global__ void __launch_bounds__(1024)
    sum_counts(unsigned int* counts, long long size, unsigned int* total,
               const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  unsigned int before = 0;
  for (long long start = 0; start < size; start += blockDim.x) {
    const long long i = start + threadIdx.x;
    const unsigned int mine = i < size ? counts[i] : 0;
    unsigned int all;
    const unsigned int earlier = sum_before(mine, &all);
    if (i < size) counts[i] = before + earlier;
    before += all;
  }
  if (threadIdx.x == 0) *total = before;
}

// Moves each pair to its place among those with the same digit, in order.
// A warp takes consecutive keys, 32 in each round, and knows how many came in earlier rounds.
template <class Key>
__global__ void __launch_bounds__(sort_threads)
    move_rows(const Key* __restrict__ keys, const unsigned int* __restrict__ positions,
              long long num_rows, int shift, const unsigned int* __restrict__ offsets,
              long long num_tiles, Key* sorted_keys, unsigned int* sorted_positions,
              const unsigned long long* __restrict__ refused) {
  __shared__ unsigned int next[sort_warps][num_digits];
  if (*refused) return;
  const int lane = threadIdx.x % warp_size;
  const int warp = threadIdx.x / warp_size;
  for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const long long first = tile * tile_size + warp * (warp_size * rounds_per_tile) + lane;
    for (int w = 0; w < sort_warps; ++w) next[w][threadIdx.x] = 0;
    __syncthreads();
    for (int round = 0; round < rounds_per_tile; ++round) {
      const long long i = first + round * warp_size;
      if (i < num_rows) atomicAdd(&next[warp][digit_of(keys[i], shift)], 1u);
    }
    __syncthreads();
    unsigned int place = offsets[threadIdx.x * num_tiles + tile];
    for (int w = 0; w < sort_warps; ++w) {
      const unsigned int of_warp = next[w][threadIdx.x];
      next[w][threadIdx.x] = place;
      place += of_warp;
    }
    __syncthreads();
    for (int round = 0; round < rounds_per_tile; ++round) {
      const long long i = first + round * warp_size;
      const unsigned int present = __ballot_sync(whole_warp, i < num_rows);
      if (i < num_rows) {
        const Key key = keys[i];
        const unsigned int digit = digit_of(key, shift);
        const unsigned int alike = __match_any_sync(present, digit);
        const unsigned int lanes_before = (1u << lane) - 1;
        const unsigned int place_of_mine = next[warp][digit] + __popc(alike & lanes_before);
        sorted_keys[place_of_mine] = key;
        sorted_positions[place_of_mine] = positions[i];
        __syncwarp(present);  // all have read `next`
        if ((alike & lanes_before) == 0) next[warp][digit] += __popc(alike);
      }
      __syncwarp();
    }
    __syncthreads();
  }
}

}  // namespace gpuopt
