// What a program is: a rule, the types that its arrays are stored in, and how a launch is given its
// scalars. Python writes one for each kernel that has a rule, as a struct derived from the rule's
// functor; sample_program.cuh shows it.
#pragma once
#include "element.cuh"
#include "rule.cuh"
#include "storage.cuh"

namespace gpuopt {

template <class Program>
using VarOf = typename Program::Var;
template <class Program>
using SlotOf = typename Program::Slot;
template <class Program>
using GradientOf = typename Program::Gradient;
template <class Program>
using CompanionOf = typename Program::Companion;
// What the rule computes in.
template <class Program>
using RealOf = Compute<VarOf<Program>>;
template <class Program>
using ScalarsOf = typename Program::template Scalars<RealOf<Program>>;

// Another rule, with a program's types.
template <class OtherRule, class Program>
struct WithTypesOf : OtherRule {
  using Var = VarOf<Program>;
  using Slot = SlotOf<Program>;
  using Gradient = GradientOf<Program>;
  using Companion = CompanionOf<Program>;
};

// The companion of a variable, in an array after its slots: nothing; or, beside a master copy of
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

// Whether the variable has 16 bits, and no master copy.
template <class Program>
constexpr bool drops_bits_of_var =
    sizeof(VarOf<Program>) == 2 && CompanionOf<Program>::num_arrays == 0;

GPUOPT_INLINE constexpr int largest(int first, int second) {
  return first > second ? first : second;
}

// The size of an element of the widest type, in bytes.
template <class Program>
constexpr int widest_of =
    largest(sizeof(VarOf<Program>), largest(sizeof(SlotOf<Program>), sizeof(GradientOf<Program>)));

// How many elements of each array are loaded and stored together: a pack of the widest type.
template <class Program>
constexpr int pack_of = pack_bytes / widest_of<Program>;

// How far an address is past a multiple of a pack, in bytes of the widest type.
template <class Program, class Element>
__device__ __forceinline__ int offset_in_pack(const Element* at) {
  constexpr int scale = widest_of<Program> / sizeof(Element);
  return static_cast<int>(reinterpret_cast<unsigned long long>(at) % (pack_bytes / scale)) * scale;
}

// How many elements there are before the next pack.
template <class Program, class Element>
__device__ __forceinline__ int elements_to_pack(const Element* at) {
  return (pack_bytes - offset_in_pack<Program>(at)) % pack_bytes / widest_of<Program>;
}

template <class Program, class Element>
__device__ __forceinline__ bool begins_pack(const Element* at) {
  return offset_in_pack<Program>(at) == 0;
}

}  // namespace gpuopt
