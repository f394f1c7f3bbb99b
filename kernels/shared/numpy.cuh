// numpy's functions of elements, for rules that are traced from numpy. Compiles as CUDA and as
// plain C++17, as rules do.
#pragma once
#include "math.cuh"

namespace gpuopt {
namespace numpy {

using Integer = long long;
using Word = unsigned long long;

template <class Real>
GPUOPT_INLINE Real infinity() {
  return Real(1) / Real(0);
}

#define GPUOPT_OF_ONE(name, function)                                    \
  GPUOPT_INLINE float name(float x) { return GPUOPT_C(function##f)(x); } \
  GPUOPT_INLINE double name(double x) { return GPUOPT_C(function)(x); }
#define GPUOPT_OF_TWO(name, function)                                                \
  GPUOPT_INLINE float name(float x, float y) { return GPUOPT_C(function##f)(x, y); } \
  GPUOPT_INLINE double name(double x, double y) { return GPUOPT_C(function)(x, y); }

GPUOPT_OF_ONE(arccos, acos)
GPUOPT_OF_ONE(arccosh, acosh)
GPUOPT_OF_ONE(arcsin, asin)
GPUOPT_OF_ONE(arcsinh, asinh)
GPUOPT_OF_ONE(arctan, atan)
GPUOPT_OF_ONE(arctanh, atanh)
GPUOPT_OF_ONE(cbrt, cbrt)
GPUOPT_OF_ONE(ceil, ceil)
GPUOPT_OF_ONE(cos, cos)
GPUOPT_OF_ONE(cosh, cosh)
GPUOPT_OF_ONE(exp, exp)
GPUOPT_OF_ONE(exp2, exp2)
GPUOPT_OF_ONE(expm1, expm1)
GPUOPT_OF_ONE(fabs, fabs)
GPUOPT_OF_ONE(floor, floor)
GPUOPT_OF_ONE(log, log)
GPUOPT_OF_ONE(log10, log10)
GPUOPT_OF_ONE(log1p, log1p)
GPUOPT_OF_ONE(log2, log2)
GPUOPT_OF_ONE(rint, rint)
GPUOPT_OF_ONE(sin, sin)
GPUOPT_OF_ONE(sinh, sinh)
GPUOPT_OF_ONE(sqrt, sqrt)
GPUOPT_OF_ONE(tan, tan)
GPUOPT_OF_ONE(tanh, tanh)
GPUOPT_OF_ONE(trunc, trunc)
GPUOPT_OF_TWO(arctan2, atan2)
GPUOPT_OF_TWO(copysign, copysign)
GPUOPT_OF_TWO(fmax, fmax)
GPUOPT_OF_TWO(fmin, fmin)
GPUOPT_OF_TWO(hypot, hypot)
GPUOPT_OF_TWO(power, pow)

#undef GPUOPT_OF_ONE
#undef GPUOPT_OF_TWO

GPUOPT_INLINE double float_power(double x, double y) { return GPUOPT_C(pow)(x, y); }

GPUOPT_INLINE float absolute(float x) { return gpuopt::absolute(x); }
GPUOPT_INLINE double absolute(double x) { return gpuopt::absolute(x); }
GPUOPT_INLINE Integer absolute(Integer x) { return x < 0 ? -x : x; }
GPUOPT_INLINE bool absolute(bool x) { return x; }

GPUOPT_INLINE bool bitwise_and(bool x, bool y) { return x && y; }
GPUOPT_INLINE bool bitwise_or(bool x, bool y) { return x || y; }
GPUOPT_INLINE bool bitwise_xor(bool x, bool y) { return x != y; }
GPUOPT_INLINE bool invert(bool x) { return !x; }
GPUOPT_INLINE Integer bitwise_and(Integer x, Integer y) { return x & y; }
GPUOPT_INLINE Integer bitwise_or(Integer x, Integer y) { return x | y; }
GPUOPT_INLINE Integer bitwise_xor(Integer x, Integer y) { return x ^ y; }
GPUOPT_INLINE Integer invert(Integer x) { return ~x; }
GPUOPT_INLINE Integer left_shift(Integer x, Integer by) {
  return by >= 0 && by < 64 ? static_cast<Integer>(static_cast<unsigned long long>(x) << by) : 0;
}
GPUOPT_INLINE Integer right_shift(Integer x, Integer by) {
  return by >= 0 && by < 64 ? x >> by : (x < 0 ? -1 : 0);
}

GPUOPT_INLINE Word bitwise_and(Word x, Word y) { return x & y; }
GPUOPT_INLINE Word bitwise_or(Word x, Word y) { return x | y; }
GPUOPT_INLINE Word bitwise_xor(Word x, Word y) { return x ^ y; }
GPUOPT_INLINE Word left_shift(Word x, Word by) { return by < 64 ? x << by : 0; }
GPUOPT_INLINE Word right_shift(Word x, Word by) { return by < 64 ? x >> by : 0; }

// Exponents of integers are not below 0: numpy refuses those.
GPUOPT_INLINE Integer power(Integer x, Integer exponent) {
  unsigned long long result = 1, factor = static_cast<unsigned long long>(x);
  for (; exponent > 0; exponent >>= 1, factor *= factor) {
    if (exponent & 1) result *= factor;
  }
  return static_cast<Integer>(result);
}

// Towards minus infinity, as Python divides; by 0, integers give 0.
GPUOPT_INLINE Integer floor_divide(Integer x, Integer y) {
  if (y == 0) return 0;
  return x / y - (x % y != 0 && (x < 0) != (y < 0));
}
GPUOPT_INLINE Integer remainder(Integer x, Integer y) {
  return y == 0 ? 0 : x - floor_divide(x, y) * y;
}
GPUOPT_INLINE float truncated_rest(float x, float y) { return GPUOPT_C(fmodf)(x, y); }
GPUOPT_INLINE double truncated_rest(double x, double y) { return GPUOPT_C(fmod)(x, y); }
template <class Real>
GPUOPT_INLINE Real remainder(Real x, Real y) {
  const Real rest = truncated_rest(x, y);
  if (rest == Real(0)) return copysign(Real(0), y);
  return (rest < Real(0)) != (y < Real(0)) ? rest + y : rest;
}
template <class Real>
GPUOPT_INLINE Real floor_divide(Real x, Real y) {
  if (y == Real(0)) return x / y;
  const Real rest = truncated_rest(x, y);
  Real quotient = (x - rest) / y;
  if (rest != Real(0) && (rest < Real(0)) != (y < Real(0))) quotient -= Real(1);
  if (quotient == Real(0)) return copysign(Real(0), x / y);
  const Real whole = floor(quotient);
  return quotient - whole > Real(0.5) ? whole + Real(1) : whole;
}

template <class Real>
GPUOPT_INLINE Real sign(Real x) {
  return gpuopt::sign(x);
}
template <class Real>
GPUOPT_INLINE Real positive(Real x) {
  return x;
}
template <class Real>
GPUOPT_INLINE Real reciprocal(Real x) {
  return Real(1) / x;
}
template <class Real>
GPUOPT_INLINE Real square(Real x) {
  return x * x;
}
template <class Real>
GPUOPT_INLINE bool isnan(Real x) {
  return x != x;
}
template <class Real>
GPUOPT_INLINE bool isfinite(Real x) {
  return x - x == Real(0);
}
template <class Real>
GPUOPT_INLINE bool isinf(Real x) {
  return x - x != Real(0) && x == x;
}
template <class Real>
GPUOPT_INLINE bool signbit(Real x) {
  return copysign(Real(1), x) < Real(0);
}

// NaN if one of the two is.
template <class Real>
GPUOPT_INLINE Real maximum(Real x, Real y) {
  return larger(x, y);
}
template <class Real>
GPUOPT_INLINE Real minimum(Real x, Real y) {
  return x < y || x != x ? x : y;
}

// NaN stays NaN.
template <class Real>
GPUOPT_INLINE Real clip(Real x, Real low, Real high) {
  return x < low ? low : (x > high ? high : x);
}

}  // namespace numpy
}  // namespace gpuopt
