// The 16-bit types that are stored, but not computed in; and 16 bytes of any type at once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "element.cuh"

namespace gpuopt {

template <>
struct ComputeType<__half> {
  using type = float;
};
template <>
struct ComputeType<__nv_bfloat16> {
  using type = float;
};

// As many elements as one memory instruction moves.
template <class Storage>
struct Pack {
  static constexpr int size = 16 / sizeof(Storage);
  Storage of[size];
};

// Precondition: `at` is aligned to 16 bytes, and in global memory: the compiler cannot know it of
// an address from a table. Each byte is touched once in a step, so it need not stay in a cache.
template <class Storage>
__device__ __forceinline__ Pack<Storage> load_pack(const Storage* at) {
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(at));
  Pack<Storage> pack;
  memcpy(&pack, &bits, sizeof pack);
  return pack;
}

template <class Storage>
__device__ __forceinline__ void store_pack(Storage* at, const Pack<Storage>& pack) {
  uint4 bits;
  memcpy(&bits, &pack, sizeof bits);
  __stcs(reinterpret_cast<uint4*>(at), bits);
}

template <class Storage>
__device__ __forceinline__ bool is_pack_aligned(const Storage* at) {
  return reinterpret_cast<unsigned long long>(at) % 16 == 0;
}

}  // namespace gpuopt
