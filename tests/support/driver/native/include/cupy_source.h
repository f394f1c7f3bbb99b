// The headers of CuPy's own kernels.
#pragma once

#include "cuda_source.h"
//
#include <cupy/carray.cuh>
#include <cupy/complex.cuh>
//
#include <cupy/math_constants.h>

#include <cupy/atomics.cuh>
#include <cupy/bfloat16.cuh>
#include <cupy/float16.cuh>
