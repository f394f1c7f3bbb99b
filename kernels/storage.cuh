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
constexpr int pack_size = 16 / sizeof(Storage);

// One element, or a pack of them.
template <class Storage, int count>
struct Elements {
  static_assert(count == 1 || count == pack_size<Storage>, "one element, or a pack");
  Storage of[count];
};

// Precondition: several are aligned to 16 bytes, and in global memory: the compiler cannot know it
// of an address from a table. Each byte is touched once in a step, so it need not stay in a cache.
template <class Storage, int count>
__device__ __forceinline__ void load(const Storage* at, Elements<Storage, count>& elements) {
  if constexpr (count == 1) {
    elements.of[0] = *at;
  } else {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(at));
    memcpy(&elements, &bits, sizeof elements);
  }
}

template <class Storage, int count>
__device__ __forceinline__ void store(Storage* at, const Elements<Storage, count>& elements) {
  if constexpr (count == 1) {
    *at = elements.of[0];
  } else {
    uint4 bits;
    memcpy(&bits, &elements, sizeof bits);
    __stcs(reinterpret_cast<uint4*>(at), bits);
  }
}

template <class Storage>
__device__ __forceinline__ bool is_pack_aligned(const Storage* at) {
  return reinterpret_cast<unsigned long long>(at) % 16 == 0;
}

}  // namespace gpuopt
