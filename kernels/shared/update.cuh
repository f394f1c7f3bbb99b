// One variable's arrays, and an update of one element, or of a pack of them.
#pragma once
#include "rounding.cuh"
#include "rule.cuh"
#include "split.cuh"
#include "storage.cuh"
#include "structs.cuh"

namespace gpuopt {

template <class Rule, class Storage>
using Scalars = typename Rule::template Scalars<Compute<Storage>>;

// How many groups' scalars are passed by value: kernels may have 4 KB of arguments. Beside an
// address, an even number has no padding.
template <class Rule, class Storage>
constexpr int few_groups =
    (2048 / sizeof(Scalars<Rule, Storage>) < 64 ? 2048 / sizeof(Scalars<Rule, Storage>) : 64) /
    (1 + Rule::is_clipped) * (1 + Rule::is_clipped);

// The scalars of several groups of variables, passed by value.
template <class Rule, class Storage, bool = Rule::is_clipped, bool = Rule::is_scaled>
struct ScalarsOfFew {
  using type = FewScalars<Scalars<Rule, Storage>, few_groups<Rule, Storage>>;
};
template <class Rule, class Storage>
struct ScalarsOfFew<Rule, Storage, true, false> {
  using type = ClippedScalars<Scalars<Rule, Storage>, few_groups<Rule, Storage>>;
};
template <class Rule, class Storage>
struct ScalarsOfFew<Rule, Storage, true, true> {
  using type = ScaledScalars<Scalars<Rule, Storage>, few_groups<Rule, Storage>>;
};
template <class Rule, class Storage>
using FewScalarsOf = typename ScalarsOfFew<Rule, Storage>::type;

// Returns where the scalars of the groups begin: of as many steps as the device has made.
template <class Few>
__device__ __forceinline__ long long first_group(const Few&) {
  return 0;
}
template <class Scalars, int count>
__device__ __forceinline__ long long first_group(const ScaledScalars<Scalars, count>& few) {
  const long long behind = few.host_count - __ldg(reinterpret_cast<const long long*>(few.num_made));
  return behind > 0 ? behind * few.num_groups : 0;
}

// Returns a clipped rule's scalars with the factor in the place of its norm's number.
template <class Rule, class Storage>
__device__ __forceinline__ Scalars<Rule, Storage> with_factor(
    Scalars<Rule, Storage> scalars, const FewScalarsOf<Rule, Storage>& few_scalars) {
  using Real = Compute<Storage>;
  const int norm = static_cast<int>(scalars.clip_factor);
  scalars.clip_factor = Real(1);
  if (norm >= 0) {
    const ClipResult* results = reinterpret_cast<const ClipResult*>(few_scalars.factors);
    scalars.clip_factor =
        static_cast<Real>(sizeof(Real) == sizeof(double) ? __ldg(&results[norm].factor_of_doubles)
                                                         : __ldg(&results[norm].factor_of_floats));
  }
  return scalars;
}

// How many arrays an update writes.
template <class Rule, class Storage>
constexpr int num_arrays = 1 + Rule::num_slots + StoredBeside<Storage>::num_arrays;

template <class Rule, class Storage>
using ArraysOf = Arrays<num_arrays<Rule, Storage>>;
template <class Rule, class Storage>
using VariableOf = Variable<num_arrays<Rule, Storage>>;

// What is kept beside a variable: an array of as many elements, or nothing.
template <class Kept>
struct Beside {
  typename Kept::Element* array;

  __device__ __forceinline__ explicit Beside(const long long* address)
      : array(reinterpret_cast<typename Kept::Element*>(*address)) {}

  __device__ __forceinline__ void move(long long elements) { array += elements; }

  template <class Storage>
  __device__ __forceinline__ bool begins_packs_with(const StoredVar<Storage>* var) const {
    return offset_in_pack<Storage>(array) == offset_in_pack<Storage>(var);
  }
};
template <>
struct Beside<Alone> {
  __device__ __forceinline__ explicit Beside(const long long*) {}
  __device__ __forceinline__ void move(long long) {}

  template <class Storage>
  __device__ __forceinline__ bool begins_packs_with(const StoredVar<Storage>*) const {
    return true;
  }
};

// Whether a rule's first slot is an average of another type than its slots.
template <class Rule, class Storage>
constexpr bool has_average_apart =
    (Rule::num_averages > 0) && !are_same<Compute<Storage>, StoredSlot<Storage>>;

// The number of the first slot that has the slots' type.
template <class Rule, class Storage>
constexpr int first_slot = has_average_apart<Rule, Storage> ? 1 : 0;

// An average, which has the type that a rule computes in, beside slots of another: its array, or
// nothing.
template <class Rule, class Storage, bool = has_average_apart<Rule, Storage>>
struct AverageArray {
  __device__ __forceinline__ explicit AverageArray(const long long*) {}
  template <class Other>
  __device__ __forceinline__ explicit AverageArray(const AverageArray<Other, Storage>&) {}
  __device__ __forceinline__ void move(long long) {}
  __device__ __forceinline__ bool begins_packs_with(const StoredVar<Storage>*) const {
    return true;
  }
};
template <class Rule, class Storage>
struct AverageArray<Rule, Storage, true> {
  using Average = Compute<Storage>;

  Average* array;

  __device__ __forceinline__ explicit AverageArray(const long long* address)
      : array(reinterpret_cast<Average*>(*address)) {}

  __device__ __forceinline__ void move(long long elements) { array += elements; }
  // Where all other arrays have 16 bits, as many elements as are a pack of these are two.
  __device__ __forceinline__ bool begins_packs_with(const StoredVar<Storage>* var) const {
    constexpr int bytes = pack_size<Storage> * static_cast<int>(sizeof(Average));
    const int offset = static_cast<int>(reinterpret_cast<unsigned long long>(array) % bytes);
    return offset / static_cast<int>(sizeof(Average)) ==
           offset_in_pack<Storage>(var) / Stored<Storage>::widest;
  }
};

// Elements of such an average, or nothing.
template <class Rule, class Storage, int count, bool = has_average_apart<Rule, Storage>>
struct AverageElements {
  template <class Target>
  __device__ __forceinline__ void load_from(const Target&, long long) {}
  __device__ __forceinline__ void get(int, Compute<Storage>*) const {}
  __device__ __forceinline__ void set(int, const Compute<Storage>*) {}
  template <class Target>
  __device__ __forceinline__ void store_to(const Target&, long long) const {}
};
template <class Rule, class Storage, int count>
struct AverageElements<Rule, Storage, count, true> {
  using Average = Compute<Storage>;
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
  __device__ __forceinline__ void get(int i, Compute<Storage>* slot) const {
    slot[0] = Compute<Storage>(parts[i / at_once].of[i % at_once]);
  }
  __device__ __forceinline__ void set(int i, const Compute<Storage>* slot) {
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
template <class Rule, class Storage>
struct Target : Numbering<Rule> {
  StoredVar<Storage>* var;
  Slots<Rule, StoredSlot<Storage>> slots;  // from `first_slot` on
  AverageArray<Rule, Storage> average;
  Beside<StoredBeside<Storage>> beside;

  // `arrays` holds the variable's address, then those of its slots, and of what is beside it.
  __device__ __forceinline__ explicit Target(const long long* arrays)
      : average(arrays + 1), beside(arrays + 1 + Rule::num_slots) {
    var = reinterpret_cast<StoredVar<Storage>*>(arrays[0]);
    for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k) {
      slots.of[k] = reinterpret_cast<StoredSlot<Storage>*>(arrays[k + 1]);
    }
  }

  // The variable and the first slots of a target of another rule.
  template <class Other>
  __device__ __forceinline__ explicit Target(const Target<Other, Storage>& other)
      : average(other.average), beside(other.beside) {
    var = other.var;
    for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k)
      slots.of[k] = other.slots.of[k];
  }

  // The same arrays, from element `begin` on.
  __device__ __forceinline__ Target from(long long begin) const {
    Target shifted = *this;
    shifted.var += begin;
    for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k) shifted.slots.of[k] += begin;
    shifted.average.move(begin);
    shifted.beside.move(begin);
    shifted.count_from(begin);
    return shifted;
  }

  // Whether packs of the variable begin at the same elements as packs of all slots.
  __device__ __forceinline__ bool has_common_packs() const {
    bool common = beside.template begins_packs_with<Storage>(var);
    common &= average.begins_packs_with(var);
    for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k) {
      common &= offset_in_pack<Storage>(slots.of[k]) == offset_in_pack<Storage>(var);
    }
    return common;
  }

  __device__ __forceinline__ bool is_pack_aligned() const {
    return has_common_packs() && begins_pack<Storage>(var);
  }
};

// Elements of a variable, and what is kept beside them: the weights that a rule computes with.
template <class Storage, int count, class Kept = StoredBeside<Storage>>
struct Weights {
  using Real = Compute<Storage>;

  Elements<StoredVar<Storage>, count> var;

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
    load<Caching::normal>(target.var + at, var);
  }

  __device__ __forceinline__ Real get(int i) const { return Real(var.of[i]); }
  __device__ __forceinline__ void set(int i, Real value) { var.of[i] = StoredVar<Storage>(value); }

  template <class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
    store<Caching::normal>(target.var + at, var);
  }
};

// The variable is the master copy: the forward pass reads what is beside it.
template <class Storage, int count, class Copy>
struct Weights<Storage, count, Copied<Copy>> {
  Elements<float, count> var;

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
    load<Caching::evict_first>(target.var + at, var);
  }

  __device__ __forceinline__ float get(int i) const { return var.of[i]; }
  __device__ __forceinline__ void set(int i, float value) { var.of[i] = value; }

  template <class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
    store<Caching::evict_first>(target.var + at, var);
    Elements<Copy, count> copy;
#pragma unroll
    for (int i = 0; i < count; ++i) copy.of[i] = Copy(var.of[i]);
    store<Caching::normal>(target.beside.array + at, copy);
  }
};

// The variable is the master copy's upper half: what is beside it is the lower one.
template <class Storage, int count>
struct Weights<Storage, count, Split> {
  Elements<unsigned short, count> var;
  Elements<unsigned short, count> remainder;

  template <class Target>
  __device__ __forceinline__ void load_from(const Target& target, long long at) {
    load<Caching::normal>(reinterpret_cast<const unsigned short*>(target.var) + at, var);
    load<Caching::evict_first>(target.beside.array + at, remainder);
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

  template <class Target>
  __device__ __forceinline__ void store_to(const Target& target, long long at) const {
    store<Caching::normal>(reinterpret_cast<unsigned short*>(target.var) + at, var);
    store<Caching::evict_first>(target.beside.array + at, remainder);
  }
};

// Elements of a variable and of its slots, in registers. They are loaded before anything is
// computed, so that one wait is for all loads.
template <class Rule, class Storage, int count>
struct State : Numbering<Rule> {
  static_assert(!Rule::is_rounded || sizeof(StoredSlot<Storage>) == 2, "to bfloat16");
  using Real = Compute<Storage>;

  Weights<Storage, count> weights;
  Elements<StoredSlot<Storage>, count> slots[slot_capacity<Rule>];
  AverageElements<Rule, Storage, count> average;

  __device__ __forceinline__ State(const Target<Rule, Storage>& target, long long at)
      : Numbering<Rule>(target) {
    this->count_from(at);
    weights.load_from(target, at);
    average.load_from(target, at);
#pragma unroll
    for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k)
      load<Caching::evict_first>(target.slots.of[k] + at, slots[k]);
  }

  __device__ __forceinline__ void update(const Real (&gradient)[count],
                                         const typename Rule::template Scalars<Real>& scalars) {
    change([&](int i, Real& value, Real* slot) {
      Rule::apply(value, gradient[i], slot, scalars);
      this->template round<drops_bits_of_var<Storage>>(i, scalars, value, slot);
      constexpr bool is_cut = drops_bits_of_var<Storage> && !Rule::is_rounded;
      Rule::follow(is_cut ? Real(StoredVar<Storage>(value)) : value, slot, scalars);
    });
  }

  // Calls `apply` with the place of each element, its weight and its slots, which it may change.
  template <class Apply>
  __device__ __forceinline__ void change(const Apply& apply) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Real value = weights.get(i);
      Real slot[slot_capacity<Rule>];
#pragma unroll
      for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k)
        slot[k] = Real(slots[k].of[i]);
      average.get(i, slot);
      apply(i, value, slot);
      weights.set(i, value);
      average.set(i, slot);
#pragma unroll
      for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k)
        slots[k].of[i] = StoredSlot<Storage>(slot[k]);
    }
  }

  // Adds to `sums` what the rule sums over a variable, of each element; nothing is changed.
  template <int num_sums>
  __device__ __forceinline__ void add_terms(const Real (&gradient)[count],
                                            const typename Rule::template Scalars<Real>& scalars,
                                            Real (&sums)[num_sums]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Real slot[slot_capacity<Rule>];
#pragma unroll
      for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k)
        slot[k] = Real(slots[k].of[i]);
      Real terms[num_sums];
      Rule::terms(weights.get(i), gradient[i], slot, scalars, terms);
#pragma unroll
      for (int k = 0; k < num_sums; ++k) sums[k] += terms[k];
    }
  }

  __device__ __forceinline__ void store_to(const Target<Rule, Storage>& target,
                                           long long at) const {
    if (writes_var<Rule>) weights.store_to(target, at);
    average.store_to(target, at);
#pragma unroll
    for (int k = first_slot<Rule, Storage>; k < Rule::num_slots; ++k)
      if (writes_slot<Rule>(k)) store<Caching::evict_first>(target.slots.of[k] + at, slots[k]);
  }
};

}  // namespace gpuopt
