// Gradients that are measured: as they are, or as the sums that they are added to meanwhile.
#pragma once
#include "accumulation.cuh"
#include "clipped_arrays.cuh"
#include "update.cuh"

namespace gpuopt {

// Stands for the type of gradients that are measured as they are.
struct AsTheyAre {};

// Some consecutive elements of a sum, and of the gradient that is added as they are loaded.
template <class Storage, class Given>
struct MeasuredChunk {
  using Element = Storage;
  using Real = Compute<Storage>;

  ClipChunk<Storage> sum;
  const Given* given;
  int size;
  bool begins;
  Real factor, divisor;

  __device__ __forceinline__ MeasuredChunk(const ClippedArray& array, long long chunk,
                                           const Adding& adding)
      : sum(array, chunk),
        given(reinterpret_cast<const Given*>(array.source) + begin_of(array, chunk)),
        size(sum.size),
        begins(adding.begins != 0),
        factor(1),
        divisor(Real(adding.divisor)) {
    sum.source = sum.target;
    if (adding.factors == 0) return;
    const ClipResult* by = reinterpret_cast<const ClipResult*>(adding.factors);
    factor = static_cast<Real>(sizeof(Real) == sizeof(double) ? __ldg(&by->factor_of_doubles)
                                                              : __ldg(&by->factor_of_floats));
  }

  // The sum that `load` has written, for a second pass: each thread reads what it wrote itself.
  __device__ __forceinline__ const ClipChunk<Storage>& again() const { return sum; }

  // Adds to a pack's elements from `at` on, writes them, and returns them, those past the end as 0.
  // To be called once for each pack.
  __device__ __forceinline__ void load(int at, Elements<Storage, pack_size<Storage>>& sums) const {
    constexpr int count = pack_size<Storage>;
    Elements<Given, count> gradients;
    load_pack<Caching::evict_first>(given, at, size, gradients);
    sums = {};
    if (!begins) load_pack<Caching::normal>(sum.source, at, size, sums);
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const Real gradient = Real(gradients.of[k]) * factor;
      Real added = Real(sums.of[k]);
      Real* const no_slots = nullptr;
      if (begins) {
        BeginSum::apply(added, gradient, no_slots, {divisor});
      } else {
        AddToSum::apply(added, gradient, no_slots, {divisor});
      }
      sums.of[k] = Storage(added);
    }
    store_up_to<Caching::normal>(sum.target, at, size, sums);
  }
};

template <class Storage>
struct MeasuredChunk<Storage, AsTheyAre> : ClipChunk<Storage> {
  __device__ __forceinline__ MeasuredChunk(const ClippedArray& array, long long chunk,
                                           const Adding&)
      : ClipChunk<Storage>(array, chunk) {}

  __device__ __forceinline__ const ClipChunk<Storage>& again() const { return *this; }
};

}  // namespace gpuopt
