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

// An integer that one memory instruction moves.
template <int bytes>
struct BitsOf;
template <>
struct BitsOf<2> {
  using type = unsigned short;
};
template <>
struct BitsOf<4> {
  using type = unsigned int;
};
template <>
struct BitsOf<8> {
  using type = unsigned long long;
};
template <>
struct BitsOf<pack_bytes> {
  using type = uint4;
};

// What caches do with a line. The next forward pass reads the weights, and the next kernel the
// parts of sums; but of gradients and slots, a step touches each byte once.
enum class Caching { normal, evict_first };

// Precondition: the elements are in global memory, and a pack is aligned to 16 bytes; the compiler
// cannot know either of an address from a table.
template <Caching caching, class Storage, int count>
__device__ __forceinline__ void load(const Storage* at, Elements<Storage, count>& elements) {
  using Bits = typename BitsOf<sizeof elements>::type;
  const Bits* address = reinterpret_cast<const Bits*>(at);
  Bits bits;
  if constexpr (caching == Caching::evict_first) {
    bits = __ldcs(address);
  } else {
    __builtin_assume(__isGlobal(address));
    bits = *address;
  }
  memcpy(&elements, &bits, sizeof bits);
}

template <Caching caching, class Storage, int count>
__device__ __forceinline__ void store(Storage* at, const Elements<Storage, count>& elements) {
  using Bits = typename BitsOf<sizeof elements>::type;
  Bits bits;
  memcpy(&bits, &elements, sizeof bits);
  Bits* address = reinterpret_cast<Bits*>(at);
  if constexpr (caching == Caching::evict_first) {
    __stcs(address, bits);
  } else {
    __builtin_assume(__isGlobal(address));
    *address = bits;
  }
}

// How many bytes an address is past a multiple of a pack's.
template <class Storage>
__device__ __forceinline__ int pack_offset(const Storage* at) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(at) % pack_bytes);
}

// How many elements there are before the next pack.
template <class Storage>
__device__ __forceinline__ int elements_to_pack(const Storage* at) {
  return (pack_bytes - pack_offset(at)) % pack_bytes / static_cast<int>(sizeof(Storage));
}

template <class Storage>
__device__ __forceinline__ bool is_pack_aligned(const Storage* at) {
  return pack_offset(at) == 0;
}

}  // namespace gpuopt
