// Where runs of equal rows begin, in one tile of sorted rows.
#pragma once
#include "runs.cuh"
#include "shares.cuh"

namespace gpuopt {

// This thread's rows of a tile, and which rows of its warp begin a run.
template <class Key, int rounds>
struct RunBegins {
  RowsOfThread<rounds> rows;
  Key keys[rounds];
  unsigned int lanes[rounds];  // by round, a mask of the warp's lanes whose rows begin a run

  // Every thread of the warp must call this.
  __device__ __forceinline__ RunBegins(const Key* __restrict__ sorted_keys, long long tile,
                                       long long end)
      : rows(tile, end) {
    Key keys_before[rounds];
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const long long i = rows.row_to_load(round);
      keys[round] = sorted_keys[i];
      keys_before[round] = sorted_keys[i > 0 ? i - 1 : 0];
    }
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
      const bool differs = (rows.row(round) == 0) | (keys[round] != keys_before[round]);
      lanes[round] = __ballot_sync(whole_warp, rows.has(round) & differs);
    }
  }

  // Returns how many runs begin in the warp's rows.
  __device__ __forceinline__ unsigned int count() const {
    unsigned int runs = 0;
#pragma unroll
    for (int round = 0; round < rounds; ++round) runs += __popc(lanes[round]);
    return runs;
  }
};

// Where the runs are written: see `SortedRows`. If `touched` is not null, the bit of each row that
// has a gradient is set in it.
struct FoundRuns {
  unsigned int* begins;
  unsigned int* num_runs;
  unsigned int* run_of_piece;
  unsigned int* touched;
  long long num_rows;
};

// Writes the runs that begin in a tile. `before` runs begin before it; returns how many do before
// the next one. Every thread of the block must call this.
template <class Key, int rounds>
__device__ __forceinline__ unsigned int write_tile(const RunBegins<Key, rounds>& found,
                                                   unsigned int before, const FoundRuns& runs) {
  const int lane = threadIdx.x % warp_size;
  const unsigned int lanes_to_mine = whole_warp >> (warp_size - 1 - lane);
  unsigned int tile_runs;
  // Only the last lane adds its warp's runs, so that every lane gets those of earlier warps.
  unsigned int begun = before + sum_before(lane == warp_size - 1 ? found.count() : 0, &tile_runs);
#pragma unroll
  for (int round = 0; round < rounds; ++round) {
    const long long i = found.rows.row(round);
    const unsigned int begun_here = begun + __popc(found.lanes[round] & lanes_to_mine);
    if (found.lanes[round] >> lane & 1u) {
      runs.begins[begun_here - 1] = static_cast<unsigned int>(i);
      if (runs.touched != nullptr) {
        const Key row = found.keys[round];
        atomicOr(&runs.touched[word_of(row)], bit_of(row));
      }
    }
    if (found.rows.has(round) && i % piece_size == 0) {
      runs.run_of_piece[i / piece_size] = begun_here - 1;
    }
    if (i == runs.num_rows - 1) {
      runs.begins[begun_here] = static_cast<unsigned int>(runs.num_rows);
      *runs.num_runs = begun_here;
    }
    begun += __popc(found.lanes[round]);
  }
  return before + tile_runs;
}

}  // namespace gpuopt
