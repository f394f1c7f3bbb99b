// One element of an update: load in the storage type, compute in the compute type, store back.
// Compiles as CUDA (nvcc, NVRTC) and as plain C++17, so that tests can run a rule on a machine
// without a GPU.
#pragma once

#if defined(__CUDACC__)
#define GPUOPT_INLINE __host__ __device__ __forceinline__
#else
#define GPUOPT_INLINE inline
#endif

namespace gpuopt {

// The type that a rule computes in. 16-bit storage is too coarse to compute in: for it, storage.cuh
// specialises this to float.
template <class Storage>
struct ComputeType {
  using type = Storage;
};
template <class Storage>
using Compute = typename ComputeType<Storage>::type;

// C++ has no arrays of length 0.
template <class Rule>
constexpr int slot_capacity = Rule::num_slots > 0 ? Rule::num_slots : 1;

template <class Rule, class Storage>
struct Slots {
  Storage* of[slot_capacity<Rule>];
};

// `at` addresses the variable and its slots, `grad_at` the gradient. They differ where the gradient
// holds only some rows.
template <class Rule, class Storage>
GPUOPT_INLINE void update_element(
    Storage* var, Slots<Rule, Storage> slots, long long at, const Storage* grad, long long grad_at,
    const typename Rule::template Scalars<Compute<Storage>>& scalars) {
  using Real = Compute<Storage>;
  Real value = Real(var[at]);
  Real slot[slot_capacity<Rule>];
  for (int k = 0; k < Rule::num_slots; ++k) slot[k] = Real(slots.of[k][at]);

  Rule::apply(value, Real(grad[grad_at]), slot, scalars);

  var[at] = Storage(value);
  for (int k = 0; k < Rule::num_slots; ++k) slots.of[k][at] = Storage(slot[k]);
}

}  // namespace gpuopt
