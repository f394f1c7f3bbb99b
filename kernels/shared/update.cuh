// One variable's arrays, and an update of one element, or of a pack of them.
#pragma once
#include "program.cuh"
#include "rounding.cuh"
#include "split.cuh"
#include "structs.cuh"

namespace gpuopt {

// How many arrays an update writes.
template <class Program>
constexpr int num_arrays = 1 + Program::num_slots + CompanionOf<Program>::num_arrays;

template <class Program>
using ArraysOf = Arrays<num_arrays<Program>>;
template <class Program>
using VariableOf = Variable<num_arrays<Program>>;

// The companion of a variable: an array of as many elements, or nothing.
template <class Kept>
struct CompanionArray {
  typename Kept::Element* array;

  __device__ __forceinline__ explicit CompanionArray(const long long* address)
      : array(reinterpret_cast<typename Kept::Element*>(*address)) {}

  __device__ __forceinline__ void move(long long elements) { array += elements; }

  template <class Program>
  __device__ __forceinline__ bool begins_packs_with(const VarOf<Program>* var) const {
    return offset_in_pack<Program>(array) == offset_in_pack<Program>(var);
  }
  __device__ __forceinline__ bool is_aligned() const { return is_pack_aligned(array); }
};
template <>
struct CompanionArray<Alone> {
  __device__ __forceinline__ explicit CompanionArray(const long long*) {}
  __device__ __forceinline__ void move(long long) {}
  __device__ __forceinline__ bool is_aligned() const { return true; }

  template <class Program>
  __device__ __forceinline__ bool begins_packs_with(const VarOf<Program>*) const {
    return true;
  }
};

// Whether a rule's first slot is an average of another type than its slots.
template <class Program>
constexpr bool has_average_apart =
    (Program::num_averages > 0) && !are_same<RealOf<Program>, SlotOf<Program>>;

// The number of the first slot that has the slots' type.
template <class Program>
constexpr int first_slot = has_average_apart<Program> ? 1 : 0;

// An average, which has the type that a rule computes in, beside slots of another: its array, or
// nothing.
template <class Program, bool = has_average_apart<Program>>
struct AverageArray {
  __device__ __forceinline__ explicit AverageArray(const long long*) {}
  template <class Other>
  __device__ __forceinline__ explicit AverageArray(const AverageArray<Other>&) {}
  __device__ __forceinline__ void move(long long) {}
  __device__ __forceinline__ bool begins_packs_with(const VarOf<Program>*) const { return true; }
};
template <class Program>
struct AverageArray<Program, true> {
  using Average = RealOf<Program>;

  Average* array;

  __device__ __forceinline__ explicit AverageArray(const long long* address)
      : array(reinterpret_cast<Average*>(*address)) {}
  template <class Other>
  __device__ __forceinline__ explicit AverageArray(const AverageArray<Other>& other)
      : array(other.array) {}

  __device__ __forceinline__ void move(long long elements) { array += elements; }
  // Where all other arrays have 16 bits, as many elements as are a pack of these are two.
  __device__ __forceinline__ bool begins_packs_with(const VarOf<Program>* var) const {
    constexpr int bytes = pack_of<Program> * static_cast<int>(sizeof(Average));
    const int offset = static_cast<int>(reinterpret_cast<unsigned long long>(array) % bytes);
    return offset / static_cast<int>(sizeof(Average)) ==
           offset_in_pack<Program>(var) / widest_of<Program>;
  }
};

// Elements of such an average, or nothing.
template <class Program, int count, bool = has_average_apart<Program>>
struct AverageElements {
  template <class Target>
  __device__ __forceinline__ void load_from(const Target&, long long) {}
  __device__ __forceinline__ void get(int, RealOf<Program>*) const {}
  __device__ __forceinline__ void set(int, const RealOf<Program>*) {}
  template <class Target>
  __device__ __forceinline__ void store_to(const Target&, long long) const {}
};
template <class Program, int count>
struct AverageElements<Program, count, true> {
  using Average = RealOf<Program>;
  // What one instruction moves.
  static constexpr int most = pack_bytes / static_cast<int>(sizeof(Average));
  static constexpr int at_once = count < most ? count : most;

  Elements<Average, at_once> parts[count / at_once];

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
#pragma unroll
    for (int k = 0; k < count / at_once; ++k)
      load<Caching::evict_first>(target.average.array + at + k * at_once, parts[k]);
  }
  __device__ __forceinline__ void get(int i, RealOf<Program>* slot) const {
    slot[0] = RealOf<Program>(parts[i / at_once].of[i % at_once]);
  }
  __device__ __forceinline__ void set(int i, const RealOf<Program>* slot) {
    parts[i / at_once].of[i % at_once] = Average(slot[0]);
  }
  template <class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
#pragma unroll
    for (int k = 0; k < count / at_once; ++k)
      store<Caching::evict_first>(target.average.array + at + k * at_once, parts[k]);
  }
};

// A variable and its slots.
template <class Program>
struct Target : Numbered {
  VarOf<Program>* var;
  Slots<Program, SlotOf<Program>> slots;  // from `first_slot` on
  AverageArray<Program> average;
  CompanionArray<CompanionOf<Program>> companion;

  // `arrays` holds the variable's address, then those of its slots, and of its companion.
  __device__ __forceinline__ explicit Target(const long long* arrays)
      : average(arrays + 1), companion(arrays + 1 + Program::num_slots) {
    var = reinterpret_cast<VarOf<Program>*>(arrays[0]);
    for (int k = first_slot<Program>; k < Program::num_slots; ++k) {
      slots.of[k] = reinterpret_cast<SlotOf<Program>*>(arrays[k + 1]);
    }
  }

  // The variable and the first slots of a target of another rule.
  template <class Other>
  __device__ __forceinline__ explicit Target(const Target<Other>& other)
      : Numbered(other), average(other.average), companion(other.companion) {
    var = other.var;
    for (int k = first_slot<Program>; k < Program::num_slots; ++k) slots.of[k] = other.slots.of[k];
  }

  // The same arrays, from element `begin` on.
  __device__ __forceinline__ Target from(long long begin) const {
    Target shifted = *this;
    shifted.var += begin;
    for (int k = first_slot<Program>; k < Program::num_slots; ++k) shifted.slots.of[k] += begin;
    shifted.average.move(begin);
    shifted.companion.move(begin);
    shifted.count_from(begin);
    return shifted;
  }

  // Whether packs of the variable begin at the same elements as packs of all slots.
  __device__ __forceinline__ bool has_common_packs() const {
    bool common = companion.template begins_packs_with<Program>(var);
    common &= average.begins_packs_with(var);
    for (int k = first_slot<Program>; k < Program::num_slots; ++k) {
      common &= offset_in_pack<Program>(slots.of[k]) == offset_in_pack<Program>(var);
    }
    return common;
  }

  __device__ __forceinline__ bool is_pack_aligned() const {
    return has_common_packs() && begins_pack<Program>(var);
  }
};

// Elements of a variable, and what is kept beside them: the weights that a rule computes with.
template <class Program, int count, class Kept = CompanionOf<Program>>
struct Weights {
  using Real = RealOf<Program>;

  Elements<VarOf<Program>, count> var;

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
    load<Caching::normal>(target.var + at, var);
  }

  __device__ __forceinline__ Real get(int i) const { return Real(var.of[i]); }
  __device__ __forceinline__ void set(int i, Real value) { var.of[i] = VarOf<Program>(value); }

  template <bool by_intrinsic = false, class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
    store<Caching::normal, by_intrinsic>(target.var + at, var);
  }
};

// The variable is the master copy: the forward pass reads its companion.
template <class Program, int count, class Copy>
struct Weights<Program, count, Copied<Copy>> {
  Elements<float, count> var;

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
    load<Caching::evict_first>(target.var + at, var);
  }

  __device__ __forceinline__ float get(int i) const { return var.of[i]; }
  __device__ __forceinline__ void set(int i, float value) { var.of[i] = value; }

  template <bool by_intrinsic = false, class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
    store<Caching::evict_first>(target.var + at, var);
    Elements<Copy, count> copy;
#pragma unroll
    for (int i = 0; i < count; ++i) copy.of[i] = Copy(var.of[i]);
    store<Caching::normal, by_intrinsic>(target.companion.array + at, copy);
  }
};

// The variable is the master copy's upper half: its companion is the lower one.
template <class Program, int count>
struct Weights<Program, count, Split> {
  Elements<unsigned short, count> var;
  Elements<unsigned short, count> remainder;

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
    load<Caching::normal>(reinterpret_cast<const unsigned short*>(target.var) + at, var);
    load<Caching::evict_first>(target.companion.array + at, remainder);
  }

  __device__ __forceinline__ float get(int i) const {
    const unsigned int bits = joined(Halves{var.of[i], remainder.of[i]});
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  __device__ __forceinline__ void set(int i, float value) {
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    const Halves halves = split(bits);
    var.of[i] = halves.weight;
    remainder.of[i] = halves.remainder;
  }

  template <bool by_intrinsic = false, class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
    store<Caching::normal, by_intrinsic>(reinterpret_cast<unsigned short*>(target.var) + at, var);
    store<Caching::evict_first>(target.companion.array + at, remainder);
  }
};

// Elements of a variable and of its slots, in registers. They are loaded before anything is
// computed, so that one wait is for all loads.
template <class Program, int count>
struct State : Numbered {
  static_assert(!Program::is_rounded || sizeof(SlotOf<Program>) == 2, "to bfloat16");
  using Real = RealOf<Program>;
  static constexpr int size = count;

  Weights<Program, count> weights;
  Elements<SlotOf<Program>, count> slots[slot_capacity<Program>];
  AverageElements<Program, count> average;

  __device__ __forceinline__ State(const Target<Program>& target, long long at) : Numbered(target) {
    count_from(at);
    weights.load_from(target, at);
    average.load_from(target, at);
#pragma unroll
    for (int k = first_slot<Program>; k < Program::num_slots; ++k)
      load<Caching::evict_first>(target.slots.of[k] + at, slots[k]);
  }

  __device__ __forceinline__ void update(const Real (&gradient)[count],
                                         const typename Program::template Scalars<Real>& scalars) {
    change([&](int i, Real& value, Real* slot) {
      Program::apply(value, read(i, gradient, slot, scalars), slot, scalars);
      round_stored(i, scalars, value, slot);
      constexpr bool is_cut = drops_bits_of_var<Program> && !Program::is_rounded;
      Program::follow(is_cut ? Real(VarOf<Program>(value)) : value, slot, scalars);
    });
  }

  // Rounds what is stored of element `i` at random, if the program does so.
  __device__ __forceinline__ void round_stored(
      int i, const typename Program::template Scalars<Real>& scalars, Real& value,
      Real* slot) const {
    if constexpr (Program::is_rounded)
      this->template round<Program, IsRoundedAlike<drops_bits_of_var<Program>, true>>(i, scalars,
                                                                                      value, slot);
  }

  __device__ __forceinline__ Real
  read(int i, const Real (&gradient)[count], Real* slot,
       const typename Program::template Scalars<Real>& scalars) const {
    return Program::gradient(gradient[i], number(i), slot, scalars);
  }

  // Whether element `i` is one of the variable's.
  __device__ __forceinline__ bool has(int) const { return true; }

  // Writes the slots of an element.
  __device__ __forceinline__ void get_slots(int i, Real* slot) const {
#pragma unroll
    for (int k = first_slot<Program>; k < Program::num_slots; ++k) slot[k] = Real(slots[k].of[i]);
    average.get(i, slot);
  }

  // Calls `apply` with the place of each element, its weight and its slots, which it may change.
  template <class Apply>
  __device__ __forceinline__ void change(const Apply& apply) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Real value = weights.get(i);
      Real slot[slot_capacity<Program>];
      get_slots(i, slot);
      apply(i, value, slot);
      weights.set(i, value);
      average.set(i, slot);
#pragma unroll
      for (int k = first_slot<Program>; k < Program::num_slots; ++k)
        slots[k].of[i] = SlotOf<Program>(slot[k]);
    }
  }

  // Adds to `sums` what the rule sums over a variable, of each element; nothing is changed.
  template <int num_sums>
  __device__ __forceinline__ void add_terms(const Real (&gradient)[count],
                                            const typename Program::template Scalars<Real>& scalars,
                                            Real (&sums)[num_sums]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Real slot[slot_capacity<Program>];
      get_slots(i, slot);
      Real terms[num_sums];
      Program::terms(weights.get(i), read(i, gradient, slot, scalars), slot, scalars, terms);
#pragma unroll
      for (int k = 0; k < num_sums; ++k) sums[k] += terms[k];
    }
  }

  __device__ __forceinline__ void store_to(const Target<Program>& target, long long at) const {
    if (writes_var<Program>) weights.store_to(target, at);
    average.store_to(target, at);
#pragma unroll
    for (int k = first_slot<Program>; k < Program::num_slots; ++k)
      if (writes_slot<Program>(k)) store<Caching::evict_first>(target.slots.of[k] + at, slots[k]);
  }
};

}  // namespace gpuopt
