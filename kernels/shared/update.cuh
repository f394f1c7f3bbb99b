// One variable's arrays, and an update of one element, or of a pack of them.
#pragma once
#include "gradient.cuh"
#include "storage.cuh"

namespace gpuopt {

template <class Rule, class Storage>
using Scalars = typename Rule::template Scalars<Compute<Storage>>;

// How many groups' scalars are passed by value: kernels may have 4 KB of arguments. Beside an
// address, an even number has no padding.
template <class Rule, class Storage>
constexpr int few_groups =
    (2048 / sizeof(Scalars<Rule, Storage>) < 64 ? 2048 / sizeof(Scalars<Rule, Storage>) : 64) /
    (1 + is_clipped<Rule>)*(1 + is_clipped<Rule>);

// The address of what clipped gradients are multiplied by, from `ClipResult` of clip.cu on.
template <class Rule, bool = is_clipped<Rule>>
struct FactorsOf {};
template <class Rule>
struct FactorsOf<Rule, true> {
  long long factors;
};

// How many steps a scaled rule's optimizer has made. The device may have made less than the host
// takes for made: so there are the scalars of all groups for the host's count, and then those for
// one less, and so on.
template <class Rule, bool = is_scaled<Rule>>
struct CountOf {
  __device__ __forceinline__ static long long first_group() { return 0; }
};
template <class Rule>
struct CountOf<Rule, true> {
  long long num_made;    // the address of the device's count, after the step
  long long host_count;  // the host's, after the step
  long long num_groups;

  // Returns where the scalars of the groups begin.
  __device__ __forceinline__ long long first_group() const {
    const long long behind = host_count - __ldg(reinterpret_cast<const long long*>(num_made));
    return behind > 0 ? behind * num_groups : 0;
  }
};

// The scalars of several groups of variables. Mirrors `FewScalars`, `ClippedScalars` and
// `ScaledScalars` in gpuopt/backends/cuda/structs.py.
template <class Rule, class Storage>
struct FewScalars : FactorsOf<Rule>, CountOf<Rule> {
  Scalars<Rule, Storage> of[few_groups<Rule, Storage>];
};

// What a kernel writes about a norm. Mirrors the columns of `Clips.factors` in
// gpuopt/backends/clips.py.
struct ClipResult {
  double squares;  // the sum of squares
  double norm;
  double factor_of_floats;
  double factor_of_doubles;
};

// Returns a clipped rule's scalars with the factor in the place of its norm's number.
template <class Rule, class Storage>
__device__ __forceinline__ Scalars<Rule, Storage> with_factor(
    Scalars<Rule, Storage> scalars, const FewScalars<Rule, Storage>& few_scalars) {
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

// The addresses of a variable and its slots, passed by value.
template <int count>
struct Arrays {
  long long of[count];
};
template <class Rule>
using ArraysOf = Arrays<1 + Rule::num_slots>;

// A variable and its slots.
template <class Rule, class Storage>
struct Target {
  StoredVar<Storage>* var;
  Slots<Rule, StoredSlot<Storage>> slots;

  // `arrays` holds the variable's address, and then those of its slots.
  __device__ __forceinline__ explicit Target(const long long* arrays) {
    var = reinterpret_cast<StoredVar<Storage>*>(arrays[0]);
    for (int k = 0; k < Rule::num_slots; ++k) {
      slots.of[k] = reinterpret_cast<StoredSlot<Storage>*>(arrays[k + 1]);
    }
  }

  // The variable and the first slots of a target of another rule.
  template <class Other>
  __device__ __forceinline__ explicit Target(const Target<Other, Storage>& other) {
    var = other.var;
    for (int k = 0; k < Rule::num_slots; ++k) slots.of[k] = other.slots.of[k];
  }

  // The same arrays, from element `begin` on.
  __device__ __forceinline__ Target from(long long begin) const {
    Target shifted = *this;
    shifted.var += begin;
    for (int k = 0; k < Rule::num_slots; ++k) shifted.slots.of[k] += begin;
    return shifted;
  }

  // Whether packs of the variable begin at the same elements as packs of all slots.
  __device__ __forceinline__ bool has_common_packs() const {
    bool common = true;
    for (int k = 0; k < Rule::num_slots; ++k) {
      common &= offset_in_pack<Storage>(slots.of[k]) == offset_in_pack<Storage>(var);
    }
    return common;
  }

  __device__ __forceinline__ bool is_pack_aligned() const {
    return has_common_packs() && begins_pack<Storage>(var);
  }
};

// Elements of a variable and of its slots, in registers. They are loaded before anything is
// computed, so that one wait is for all loads.
template <class Rule, class Storage, int count>
struct State {
  using Real = Compute<Storage>;

  Elements<StoredVar<Storage>, count> var;
  Elements<StoredSlot<Storage>, count> slots[slot_capacity<Rule>];

  __device__ __forceinline__ State(const Target<Rule, Storage>& target, long long at) {
    load<Caching::normal>(target.var + at, var);
#pragma unroll
    for (int k = 0; k < Rule::num_slots; ++k)
      load<Caching::evict_first>(target.slots.of[k] + at, slots[k]);
  }

  __device__ __forceinline__ void update(const Real (&gradient)[count],
                                         const typename Rule::template Scalars<Real>& scalars) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Real value = Real(var.of[i]);
      Real slot[slot_capacity<Rule>];
#pragma unroll
      for (int k = 0; k < Rule::num_slots; ++k) slot[k] = Real(slots[k].of[i]);
      Rule::apply(value, gradient[i], slot, scalars);
      var.of[i] = StoredVar<Storage>(value);
#pragma unroll
      for (int k = 0; k < Rule::num_slots; ++k) slots[k].of[i] = StoredSlot<Storage>(slot[k]);
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
      for (int k = 0; k < Rule::num_slots; ++k) slot[k] = Real(slots[k].of[i]);
      Real terms[num_sums];
      Rule::terms(Real(var.of[i]), gradient[i], slot, scalars, terms);
#pragma unroll
      for (int k = 0; k < num_sums; ++k) sums[k] += terms[k];
    }
  }

  __device__ __forceinline__ void store_to(const Target<Rule, Storage>& target,
                                           long long at) const {
    store<Caching::normal>(target.var + at, var);
#pragma unroll
    for (int k = 0; k < Rule::num_slots; ++k)
      store<Caching::evict_first>(target.slots.of[k] + at, slots[k]);
  }
};

}  // namespace gpuopt
