// One variable's arrays, and an update of 1 or of 16 bytes' worth of its elements.
#pragma once
#include "storage.cuh"

namespace gpuopt {

// Where a variable and its slots are. Addresses come from tables of 64-bit integers.
template <class Rule, class Storage>
struct Target {
  Storage* var;
  Slots<Rule, Storage> slots;

  // `table` holds the variable's address, and then, each `stride` further, those of its slots.
  __device__ __forceinline__ Target(const long long* table, long long stride) {
    var = reinterpret_cast<Storage*>(table[0]);
    for (int k = 0; k < Rule::num_slots; ++k) {
      slots.of[k] = reinterpret_cast<Storage*>(table[(k + 1) * stride]);
    }
  }

  __device__ __forceinline__ bool is_pack_aligned() const {
    bool aligned = gpuopt::is_pack_aligned(var);
    for (int k = 0; k < Rule::num_slots; ++k) aligned &= gpuopt::is_pack_aligned(slots.of[k]);
    return aligned;
  }
};

// Updates the elements from `at` on, as many as `gradient` has. Several need 16-byte alignment.
template <class Rule, class Storage, int count>
__device__ __forceinline__ void update_elements(
    const Target<Rule, Storage>& target, long long at, const Compute<Storage> (&gradient)[count],
    const typename Rule::template Scalars<Compute<Storage>>& scalars) {
  using Real = Compute<Storage>;
  static_assert(count == 1 || count == Pack<Storage>::size, "one element, or a pack");
  if constexpr (count == 1) {
    Real value = Real(target.var[at]);
    Real slot[slot_capacity<Rule>];
    for (int k = 0; k < Rule::num_slots; ++k) slot[k] = Real(target.slots.of[k][at]);
    Rule::apply(value, gradient[0], slot, scalars);
    target.var[at] = Storage(value);
    for (int k = 0; k < Rule::num_slots; ++k) target.slots.of[k][at] = Storage(slot[k]);
  } else {
    Pack<Storage> var = load_pack(target.var + at);
    Pack<Storage> slots[slot_capacity<Rule>];
#pragma unroll
    for (int k = 0; k < Rule::num_slots; ++k) slots[k] = load_pack(target.slots.of[k] + at);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      Real value = Real(var.of[i]);
      Real slot[slot_capacity<Rule>];
#pragma unroll
      for (int k = 0; k < Rule::num_slots; ++k) slot[k] = Real(slots[k].of[i]);
      Rule::apply(value, gradient[i], slot, scalars);
      var.of[i] = Storage(value);
#pragma unroll
      for (int k = 0; k < Rule::num_slots; ++k) slots[k].of[i] = Storage(slot[k]);
    }
    store_pack(target.var + at, var);
#pragma unroll
    for (int k = 0; k < Rule::num_slots; ++k) store_pack(target.slots.of[k] + at, slots[k]);
  }
}

// Reads as many elements of a gradient as the array has; several need 16-byte alignment.
template <class Storage, int count>
__device__ __forceinline__ void load_gradient(const Storage* at,
                                              Compute<Storage> (&gradient)[count]) {
  if constexpr (count == 1) {
    gradient[0] = Compute<Storage>(*at);
  } else {
    const Pack<Storage> pack = load_pack(at);
#pragma unroll
    for (int i = 0; i < count; ++i) gradient[i] = Compute<Storage>(pack.of[i]);
  }
}

}  // namespace gpuopt
