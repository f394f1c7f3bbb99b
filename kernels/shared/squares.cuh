// How squares are added up, so that every device and every launch gives the same bits. A chunk's
// elements are divided among lanes, a pack in turn. Each place of a lane's packs has a sum of its
// own, to which squares come in order; then neighbouring places are added up, and at last the
// lanes, each with the one that is half of them further. So a sum of squares of a chunk of floats
// has 16 + 2 + 8 additions one after the other. Compiles as CUDA and as plain C++17.
// Mirrors gpuopt/backends/cpu/squares.py.
#pragma once
#include "constants.cuh"
#include "math.cuh"

namespace gpuopt {

// A chunk of floats whose sum is more than a float holds is added up again, where a norm may be
// divided by a loss scale: its elements are multiplied by this, and the sum is divided by the
// square. The largest are squared to 2^96 then, and a chunk of them adds up to 2^110.
constexpr double made_smaller = 0x1p-80;

// Adds up the sums of a lane's places, in place of the first one.
template <int places, class Real>
GPUOPT_INLINE Real add_places(Real (&sums)[places]) {
#pragma unroll
  for (int step = 1; step < places; step *= 2) {
#pragma unroll
    for (int k = 0; k < places; k += 2 * step) sums[k] += sums[k + step];
  }
  return sums[0];
}

}  // namespace gpuopt
