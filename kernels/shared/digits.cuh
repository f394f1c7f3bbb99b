// Shares and tiles of a stable radix sort: each block has a share of consecutive rows, and goes
// through it tile by tile. It counts digits by warp, and then moves each (row, position) pair to
// its place among those with the same digit, in order.
#pragma once
#include "element.cuh"
#include "grid.cuh"
#include "structs.cuh"

namespace gpuopt {

constexpr int sort_warps = sort_threads / warp_size;
// Rows of a tile for each thread. A warp's are consecutive, 32 in each round.
constexpr int rounds_per_tile = tile_size / sort_threads;

// Rows from `begin` to `end`.
struct Range {
  long long begin;
  long long end;
};

__device__ __forceinline__ Range rows_of(const Shares& shares, long long share) {
  const long long begin = share * shares.rows_per_share;
  const long long end = begin + shares.rows_per_share;
  return {begin, end < shares.num_rows ? end : shares.num_rows};
}

__device__ __forceinline__ long long num_groups_of(const Shares& shares) {
  return (shares.num_shares + shares_per_group - 1) / shares_per_group;
}

// Those rows of a tile that are this thread's: in each round one, warp_size after the one before.
template <int rounds>
struct RowsOfThread {
  long long first;  // its row in the first round
  long long end;    // after the last row that there is

  __device__ __forceinline__ RowsOfThread(long long tile, long long rows_end) {
    const int warp = threadIdx.x / warp_size;
    first = tile + warp * (warp_size * rounds) + threadIdx.x % warp_size;
    end = rows_end;
  }

  __device__ __forceinline__ long long row(int round) const { return first + round * warp_size; }

  __device__ __forceinline__ bool has(int round) const { return row(round) < end; }

  // The row of a round, or the last one there is: so that a load need not wait for a condition,
  // and those of all rounds are in flight together.
  __device__ __forceinline__ long long row_to_load(int round) const {
    return has(round) ? row(round) : end - 1;
  }
};

static_assert(num_digits == sort_threads, "each thread adds up the counts of one digit");

template <class Key>
__device__ __forceinline__ unsigned int digit_of(Key key, int shift) {
  return static_cast<unsigned int>(key >> shift) % num_digits;
}

// Rows of a tile with their positions in the gradient.
template <class Key, int rounds>
struct Pairs {
  Key keys[rounds];
  unsigned int positions[rounds];

  // A gradient's own rows are of a signed type. Their positions are their indices, and
  // `positions_before` is not read.
  template <class Source>
  __device__ __forceinline__ Pairs(const RowsOfThread<rounds>& rows,
                                   const Source* __restrict__ source,
                                   const unsigned int* __restrict__ positions_before) {
    constexpr bool is_first = Source(-1) < Source(0);
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const long long i = rows.row_to_load(round);
      keys[round] = static_cast<Key>(source[i]);
      positions[round] = is_first ? static_cast<unsigned int>(i) : positions_before[i];
    }
  }
};

// For each warp and digit: first how many of its keys have the digit, then where the next goes.
using Next = unsigned int[sort_warps][num_digits];

// Every thread of the block must call this, and what follows.
template <int rounds, class Key>
__device__ __forceinline__ void count_by_warp(const RowsOfThread<rounds>& rows,
                                              const Pairs<Key, rounds>& pairs, int shift,
                                              Next& next) {
#pragma unroll
  for (int w = 0; w < sort_warps; ++w) next[w][threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    if (rows.has(round)) {
      atomicAdd(&next[threadIdx.x / warp_size][digit_of(pairs.keys[round], shift)], 1u);
    }
  }
  __syncthreads();
}

// Returns how many keys of the tile have the digit threadIdx.x.
__device__ __forceinline__ unsigned int count_in_tile(const Next& next) {
  unsigned int count = 0;
#pragma unroll
  for (int w = 0; w < sort_warps; ++w) count += next[w][threadIdx.x];
  return count;
}

// Makes places of counts. `place` is where the tile's first key with the digit threadIdx.x goes;
// returns where the next tile's does.
__device__ __forceinline__ unsigned int find_places(Next& next, unsigned int place) {
#pragma unroll
  for (int w = 0; w < sort_warps; ++w) {
    const unsigned int count = next[w][threadIdx.x];
    next[w][threadIdx.x] = place;
    place += count;
  }
  __syncthreads();
  return place;
}

// Moves the pairs in order. After it, the block needs a barrier before `next` is written again.
template <int rounds, class Key>
__device__ __forceinline__ void move_pairs(const RowsOfThread<rounds>& rows,
                                           const Pairs<Key, rounds>& pairs, int shift, Next& next,
                                           Key* sorted_keys, unsigned int* sorted_positions) {
  const int warp = threadIdx.x / warp_size;
  const unsigned int lanes_before = (1u << threadIdx.x % warp_size) - 1;
  unsigned int alike[rounds];  // the warp's lanes whose keys have the same digit
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    alike[round] = __match_any_sync(
        whole_warp, rows.has(round) ? digit_of(pairs.keys[round], shift) : num_digits);
  }
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const bool is_there = rows.has(round);
    unsigned int& place_of_first = next[warp][digit_of(pairs.keys[round], shift)];
    if (is_there) {
      const unsigned int place = place_of_first + __popc(alike[round] & lanes_before);
      sorted_keys[place] = pairs.keys[round];
      sorted_positions[place] = pairs.positions[round];
    }
    __syncwarp();  // all have read `next`
    if (is_there && (alike[round] & lanes_before) == 0) place_of_first += __popc(alike[round]);
    __syncwarp();
  }
}

}  // namespace gpuopt
