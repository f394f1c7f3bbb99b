// The 16-bit types, which are stored but not computed in; and packs: 16 bytes of any type.
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

// A pack: as many elements as one memory instruction moves.
constexpr int pack_bytes = 16;
template <class Storage>
constexpr int pack_size = pack_bytes / sizeof(Storage);

// One element, or a pack of them.
template <class Storage, int count>
struct Elements {
  static_assert(count == 1 || count == pack_size<Storage>, "one element, or a pack");
  Storage of[count];
};

// Precondition: a pack is aligned to 16 bytes, and in global memory; the compiler cannot know
// either of an address from a table. A step touches each byte once, so caches need not keep it.
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
  return reinterpret_cast<unsigned long long>(at) % pack_bytes == 0;
}

}  // namespace gpuopt
