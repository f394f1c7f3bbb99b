// The 16-bit types, which are stored but not computed in; updates whose arrays are of several
// types; and packs: 16 bytes of any type.
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

// What is kept beside a variable, in an array after its slots: nothing; or, beside a master copy of
// the weights, the weights in a 16-bit type; or, beside bfloat16 weights, the bits that their
// master copy has besides.
struct Alone {
  static constexpr int num_arrays = 0;
};
template <class ElementType>
struct Copied {
  using Element = ElementType;
  static constexpr int num_arrays = 1;
};

struct Split {
  using Element = unsigned short;
  static constexpr int num_arrays = 1;
};

// Stands for `Storage` where a variable, its slots and its gradient are not all of one type, each
// float or a 16-bit type; or where something is kept beside it.
template <class Var, class Slot, class Gradient, class Beside = Alone>
struct Mixed {};
template <class Var, class Slot, class Gradient, class Beside>
struct ComputeType<Mixed<Var, Slot, Gradient, Beside>> {
  using type = float;
};

// The types of the arrays of an update.
template <class Storage>
struct Stored {
  using Var = Storage;
  using Slot = Storage;
  using Gradient = Storage;
  using Beside = Alone;
  static constexpr int widest = sizeof(Storage);  // of an element, in bytes
};
template <class VarType, class SlotType, class GradientType, class BesideType>
struct Stored<Mixed<VarType, SlotType, GradientType, BesideType>> {
  using Var = VarType;
  using Slot = SlotType;
  using Gradient = GradientType;
  using Beside = BesideType;
  static constexpr int widest = sizeof(Var) + sizeof(Slot) + sizeof(Gradient) == 6 ? 2 : 4;
};
template <class Storage>
using StoredVar = typename Stored<Storage>::Var;
template <class Storage>
using StoredSlot = typename Stored<Storage>::Slot;
template <class Storage>
using StoredGradient = typename Stored<Storage>::Gradient;
template <class Storage>
using StoredBeside = typename Stored<Storage>::Beside;

template <class First, class Second>
constexpr bool are_same = false;
template <class Type>
constexpr bool are_same<Type, Type> = true;

// Whether what a rule makes of the variable is stored in 16 bits, and nothing is kept of the
// others.
template <class Storage>
constexpr bool drops_bits_of_var =
    sizeof(StoredVar<Storage>) == 2 && StoredBeside<Storage>::num_arrays == 0;

// A pack: as many elements as one memory instruction moves, of the widest of an update's types.
constexpr int pack_bytes = 16;
template <class Storage>
constexpr int pack_size = pack_bytes / Stored<Storage>::widest;

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

// Stores a pack. By an intrinsic, as the compiler makes several stores of an assignment to one of
// two places.
template <Caching caching, class Element, int count>
__device__ __forceinline__ void store_pack(Element* to, const Elements<Element, count>& elements) {
  if constexpr (caching == Caching::normal) {
    using Bits = typename BitsOf<sizeof elements>::type;
    Bits bits;
    memcpy(&bits, &elements, sizeof bits);
    __stwb(reinterpret_cast<Bits*>(to), bits);
  } else {
    store<caching>(to, elements);
  }
}

// How far an address is past a multiple of a pack of an update's, in bytes of its widest type.
template <class Storage, class Element>
__device__ __forceinline__ int offset_in_pack(const Element* at) {
  constexpr int scale = Stored<Storage>::widest / sizeof(Element);
  return static_cast<int>(reinterpret_cast<unsigned long long>(at) % (pack_bytes / scale)) * scale;
}

// How many elements there are before the next pack.
template <class Storage, class Element>
__device__ __forceinline__ int elements_to_pack(const Element* at) {
  return (pack_bytes - offset_in_pack<Storage>(at)) % pack_bytes / Stored<Storage>::widest;
}

template <class Storage, class Element>
__device__ __forceinline__ bool begins_pack(const Element* at) {
  return offset_in_pack<Storage>(at) == 0;
}

// The same, of an array alone.
template <class Element>
__device__ __forceinline__ bool is_pack_aligned(const Element* at) {
  return begins_pack<Element>(at);
}

}  // namespace gpuopt
