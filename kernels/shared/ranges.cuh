// Ranges of numbers side by side: each begins at a member of its own, and ends where the next one
// begins.
#pragma once

namespace gpuopt {

// Returns which range has a number. Precondition: they are in order, and the first one begins at or
// before it.
template <auto begin_of, class Range>
__device__ __forceinline__ long long range_with(const Range* ranges, long long num_ranges,
                                                long long number) {
  long long begin = 0;
  for (long long end = num_ranges; end - begin > 1;) {
    const long long middle = (begin + end) / 2;
    (__ldg(&(ranges[middle].*begin_of)) <= number ? begin : end) = middle;
  }
  return begin;
}

}  // namespace gpuopt
