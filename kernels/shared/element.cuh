// The type that a rule computes in, and where a variable's slots are. Compiles as CUDA (nvcc,
// NVRTC) and as plain C++17, as rules do.
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

// A kernel is a template of one type. Where it needs several, this one has them: a struct that
// Python writes for the kernel.
template <class Types>
using StorageOf = typename Types::Storage;  // an element of gradients
template <class Types>
using ComputeOf = Compute<StorageOf<Types>>;
template <class Types>
using DecisionOf = typename Types::Decision;  // `NoDecision`, or a `LossDecision`
template <class Types>
using KeyOf = typename Types::Key;  // of sorted rows

// C++ has no arrays of length 0.
template <class Rule>
constexpr int slot_capacity = Rule::num_slots > 0 ? Rule::num_slots : 1;

template <class Rule, class Storage>
struct Slots {
  Storage* of[slot_capacity<Rule>];
};

}  // namespace gpuopt
