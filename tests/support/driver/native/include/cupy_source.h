// The headers of CuPy's own kernels.
#pragma once

#include "cuda_source.h"
//
#include <cupy/carray.cuh>
#include <cupy/complex.cuh>
//
#include <cupy/math_constants.h>

#include <cupy/atomics.cuh>
#if __has_include(<cupy/bfloat16.cuh>)  // since CuPy 14
#include <cupy/bfloat16.cuh>
#include <cupy/float16.cuh>
#endif
