// The few functions that rules need, spelled the same on host and device.
#pragma once
#include "element.cuh"

// A function of C's library. Without <cmath>, which takes g++ longer than a small rule does.
#if defined(__CUDACC__)
#define GPUOPT_C(function) ::function
#else
#define GPUOPT_C(function) __builtin_##function
#endif

namespace gpuopt {

GPUOPT_INLINE float square_root(float x) { return GPUOPT_C(sqrtf)(x); }
GPUOPT_INLINE double square_root(double x) { return GPUOPT_C(sqrt)(x); }

GPUOPT_INLINE float absolute(float x) { return GPUOPT_C(fabsf)(x); }
GPUOPT_INLINE double absolute(double x) { return GPUOPT_C(fabs)(x); }

GPUOPT_INLINE float power(float x, float exponent) { return GPUOPT_C(powf)(x, exponent); }
GPUOPT_INLINE double power(double x, double exponent) { return GPUOPT_C(pow)(x, exponent); }

GPUOPT_INLINE float exponential(float x) { return GPUOPT_C(expf)(x); }
GPUOPT_INLINE double exponential(double x) { return GPUOPT_C(exp)(x); }

GPUOPT_INLINE bool is_negative_zero(float x) { return x == 0 && GPUOPT_C(copysignf)(1, x) < 0; }
GPUOPT_INLINE bool is_negative_zero(double x) { return x == 0 && GPUOPT_C(copysign)(1.0, x) < 0; }

// x * y + z, rounded once. A host without such an instruction rounds the sum twice, in float64, and
// does not fuse float64: what rounding took from a product is then taken for 0.
GPUOPT_INLINE float fused(float x, float y, float z) {
#if defined(__CUDACC__) || defined(__FP_FAST_FMAF)
  return GPUOPT_C(fmaf)(x, y, z);
#else
  return static_cast<float>(static_cast<double>(x) * y + z);
#endif
}
GPUOPT_INLINE double fused(double x, double y, double z) {
#if defined(__CUDACC__) || defined(__FP_FAST_FMA)
  return GPUOPT_C(fma)(x, y, z);
#else
  return x * y + z;
#endif
}

// The larger of two; NaN if one of them is.
template <class Real>
GPUOPT_INLINE Real larger(Real x, Real y) {
  return x > y || x != x ? x : y;
}

// The nearest number within [-bound, bound]; NaN stays NaN.
template <class Real>
GPUOPT_INLINE Real clip(Real x, Real bound) {
  return x < -bound ? -bound : (x > bound ? bound : x);
}

// -1, 0 or 1; NaN stays NaN.
template <class Real>
GPUOPT_INLINE Real sign(Real x) {
  return x > Real(0) ? Real(1) : (x < Real(0) ? Real(-1) : (x == Real(0) ? Real(0) : x));
}

}  // namespace gpuopt
