// The 16-bit types, which are stored but not computed in; and packs: 16 bytes of any type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "constants.cuh"
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

template <class First, class Second>
constexpr bool are_same = false;
template <class Type>
constexpr bool are_same<Type, Type> = true;

// A pack: as many elements as one memory instruction moves.
template <class Storage>
constexpr int pack_size = pack_bytes / sizeof(Storage);

// One element, or a pack of them.
template <class Storage, int count>
struct Elements {
  static_assert(count == 1 || count == pack_size<Storage> || count * sizeof(Storage) == 8,
                "one element, or a pack");
  Storage of[count];
};

// An integer that one memory instruction moves.
template <int bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = unsigned char;
};
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

// `by_intrinsic` is for code that stores to either of two arrays: the compiler would divide a plain
// assignment into several stores.
template <Caching caching, bool by_intrinsic = false, class Storage, int count>
__device__ __forceinline__ void store(Storage* at, const Elements<Storage, count>& elements) {
  using Bits = typename BitsOf<sizeof elements>::type;
  Bits bits;
  memcpy(&bits, &elements, sizeof bits);
  Bits* address = reinterpret_cast<Bits*>(at);
  if constexpr (caching == Caching::evict_first) {
    __stcs(address, bits);
  } else if constexpr (by_intrinsic) {
    __stwb(address, bits);
  } else {
    __builtin_assume(__isGlobal(address));
    *address = bits;
  }
}

template <class Element>
__device__ __forceinline__ bool is_pack_aligned(const Element* at) {
  return reinterpret_cast<unsigned long long>(at) % pack_bytes == 0;
}

}  // namespace gpuopt
