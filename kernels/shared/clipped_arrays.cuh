// Many arrays whose norm is taken, in chunks of one size.
#pragma once
#include "ranges.cuh"
#include "squares.cuh"
#include "storage.cuh"
#include "structs.cuh"

namespace gpuopt {

// The number of the array that has a chunk. Precondition: the arrays are in order, and none is
// empty.
__device__ __forceinline__ long long number_of_array(const ClippedArray* arrays,
                                                     long long num_arrays, long long chunk) {
  return range_with<&ClippedArray::first_chunk>(arrays, num_arrays, chunk);
}

__device__ __forceinline__ const ClippedArray& array_of(const ClippedArray& only,
                                                        const ClippedArray* arrays,
                                                        long long num_arrays, long long chunk) {
  return num_arrays == 1 ? only : arrays[number_of_array(arrays, num_arrays, chunk)];
}

// The number of a chunk's first element among those of its array.
__device__ __forceinline__ long long begin_of(const ClippedArray& array, long long chunk) {
  return (chunk - array.first_chunk) * clip_chunk;
}

// Some consecutive elements of an array: a chunk's, or the array's last ones.
template <class Storage>
struct ClipChunk {
  const Storage* source;
  Storage* target;
  int size;

  __device__ __forceinline__ ClipChunk(const ClippedArray& array, long long chunk) {
    const long long begin = begin_of(array, chunk);
    source = reinterpret_cast<const Storage*>(array.source) + begin;
    target = reinterpret_cast<Storage*>(array.target) + begin;
    const long long left = array.size - begin;
    size = static_cast<int>(left < clip_chunk ? left : clip_chunk);
  }

  // Loads a pack's elements from `at` on, those past the end as 0.
  __device__ __forceinline__ void load(int at, Elements<Storage, pack_size<Storage>>& pack) const {
    if (is_pack_aligned(source) && at + pack_size<Storage> <= size) {
      gpuopt::load<Caching::normal>(source + at, pack);
      return;
    }
#pragma unroll
    for (int k = 0; k < pack_size<Storage>; ++k) {
      Elements<Storage, 1> one = {{Storage(0.0f)}};
      if (at + k < size) gpuopt::load<Caching::normal>(source + at + k, one);
      pack.of[k] = one.of[0];
    }
  }
};

}  // namespace gpuopt
