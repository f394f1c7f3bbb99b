// Variables that are updated together by sparse gradients: tables of one width, whose rows have
// keys of one range.
#pragma once
#include "ranges.cuh"
#include "update.cuh"

namespace gpuopt {

// The tables of one launch. A single one is passed by value; `gradients` are read if there are
// more.
struct Tables {
  const TableGradient& only;
  const TableGradient* __restrict__ gradients;
  long long count;

  // The number of the table that has a key. Precondition: they are in the order of their keys.
  __device__ __forceinline__ long long number_of(unsigned long long key) const {
    return range_with<&TableGradient::first_key>(gradients, count, static_cast<long long>(key));
  }

  __device__ __forceinline__ long long first_key_of(long long number) const {
    return count == 1 ? only.first_key : __ldg(&gradients[number].first_key);
  }

  __device__ __forceinline__ long long first_number_of(long long number) const {
    return count == 1 ? only.first_number : __ldg(&gradients[number].first_number);
  }

  template <class Storage>
  __device__ __forceinline__ const Storage* values_of(long long number) const {
    const long long values = count == 1 ? only.values : __ldg(&gradients[number].values);
    return reinterpret_cast<const Storage*>(values);
  }
};

}  // namespace gpuopt
