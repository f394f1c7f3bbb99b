// The value of a schedule at a step, from numbers in device memory.
// Mirrors gpuopt/rules/schedule_formulas.py, operation by operation: products are rounded before
// they are added, and powers, logarithms and cosines are computed in double and rounded once.
#pragma once
#include "math.cuh"
#include "random_bits.cuh"

namespace gpuopt {

__device__ __forceinline__ float rounded_down(float x) { return floorf(x); }
__device__ __forceinline__ double rounded_down(double x) { return floor(x); }

__device__ __forceinline__ float rounded_up(float x) { return ceilf(x); }
__device__ __forceinline__ double rounded_up(double x) { return ceil(x); }

template <class Real>
__device__ __forceinline__ Real rounded_power(Real base, Real exponent) {
  return Real(pow(double(base), double(exponent)));
}

template <class Real>
__device__ __forceinline__ Real rounded_logarithm(Real x) {
  return Real(log(double(x)));
}

// The cosine of `half_turns` times pi, the product rounded. Not by cos, whose reduction of large
// arguments takes memory of each thread.
template <class Real>
__device__ __forceinline__ Real cosine(Real half_turns) {
  constexpr double pi = 3.14159265358979323846;
  return Real(cospi(double(times(Real(pi), half_turns)) / pi));
}

// Half a cosine wave, which falls from 1 at 0 to 0 at 1.
template <class Real>
__device__ __forceinline__ Real wave(Real fraction) {
  return times(Real(0.5), Real(1) + cosine(fraction));
}

template <class Real>
__device__ __forceinline__ Real smaller(Real x, Real y) {
  return y < x ? y : x;
}

template <class Real>
__device__ __forceinline__ Real at_least_one(Real x) {
  return x > Real(1) ? x : Real(1);
}

// A random number for each seed and step, of mean 0 and variance 1: the number of ones among 1,024
// random bits, made continuous by a uniform number.
__device__ __forceinline__ double normal(unsigned long long seed, long long step) {
  constexpr int words = 16;
  const unsigned long long key = mix(seed + golden);
  const unsigned long long first = static_cast<unsigned long long>(step) * (words + 1);
  int ones = 0;
  for (int word = 1; word <= words; ++word) ones += __popcll(mix(key + (first + word) * golden));
  const double uniform = times(double(mix(key + first * golden) >> 11), 0x1p-53);
  return (double(ones - 32 * words) - 0.5 + uniform) / sqrt(16.0 * words + 1.0 / 12.0);
}

// ---- The formulas. `c` are the constants, at the places that the enumerators name; `count` is the
// step with all its digits.

struct LinearWarmup {
  enum { start, peak, warmup_steps };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real rise = Real(c[peak]) - Real(c[start]);
    return Real(c[start]) + times(rise, step / Real(c[warmup_steps]));
  }
};

struct ExponentialDecay {
  enum { learning_rate, decay_steps, decay_rate, staircase };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real decays = step / Real(c[decay_steps]);
    const Real power =
        rounded_power(Real(c[decay_rate]), c[staircase] != 0 ? rounded_down(decays) : decays);
    return times(Real(c[learning_rate]), power);
  }
};

struct InverseTimeDecay {
  enum { learning_rate, decay_steps, decay_rate, staircase };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real decays = step / Real(c[decay_steps]);
    const Real whole = c[staircase] != 0 ? rounded_down(decays) : decays;
    return Real(c[learning_rate]) / (Real(1) + times(Real(c[decay_rate]), whole));
  }
};

struct PolynomialDecay {
  enum { learning_rate, decay_steps, end_learning_rate, power, cycle };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    Real steps = Real(c[decay_steps]);
    if (c[cycle] != 0) {
      steps = times(steps, at_least_one(rounded_up(step / steps)));
    } else {
      step = smaller(step, steps);
    }
    const Real end = Real(c[end_learning_rate]);
    const Real remaining = rounded_power(Real(1) - step / steps, Real(c[power]));
    return times(Real(c[learning_rate]) - end, remaining) + end;
  }
};

// Its constants are the boundaries, and after them the values, one more.
struct PiecewiseConstant {
  enum { boundaries };
  template <class Real>
  __device__ __forceinline__ static Real at(long long count, const double* c, int num_constants) {
    const int num_boundaries = num_constants / 2;
    int piece = 0;
    while (piece<num_boundaries&& double(count)> c[boundaries + piece]) ++piece;
    return Real(c[num_boundaries + piece]);
  }
};

struct CosineDecay {
  enum { learning_rate, decay_steps, alpha, rest };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real steps = Real(c[decay_steps]);
    const Real decayed = times(Real(c[rest]), wave(smaller(step, steps) / steps)) + Real(c[alpha]);
    return times(Real(c[learning_rate]), decayed);
  }
};

struct CosineDecayRestarts {
  enum { learning_rate, first_decay_steps, t_mul, m_mul, alpha };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real growth = Real(c[t_mul]);
    Real fraction = step / Real(c[first_decay_steps]);
    Real restarts;
    if (growth == Real(1)) {
      restarts = rounded_down(fraction);
      fraction -= restarts;
    } else {
      const Real grown = Real(1) - times(fraction, Real(1) - growth);
      restarts = rounded_down(rounded_logarithm(grown) / rounded_logarithm(growth));
      const Real length = rounded_power(growth, restarts);
      fraction = (fraction - (Real(1) - length) / (Real(1) - growth)) / length;
    }
    const Real half = times(Real(0.5), rounded_power(Real(c[m_mul]), restarts));
    const Real decayed = times(half, Real(1) + cosine(fraction));
    const Real rest = times(Real(1) - Real(c[alpha]), decayed);
    return times(Real(c[learning_rate]), rest + Real(c[alpha]));
  }
};

struct LinearCosineDecay {
  enum { learning_rate, decay_steps, num_periods, alpha, beta };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real steps = Real(c[decay_steps]);
    step = smaller(step, steps);
    const Real linear = (steps - step) / steps;
    const Real waves = wave(times(times(Real(2), Real(c[num_periods])), step / steps));
    const Real decayed = times(Real(c[alpha]) + linear, waves) + Real(c[beta]);
    return times(Real(c[learning_rate]), decayed);
  }
};

struct NoisyLinearCosineDecay {
  enum {
    learning_rate,
    decay_steps,
    initial_variance,
    variance_decay,
    num_periods,
    alpha,
    beta,
    seed
  };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long count, const double* c) {
    const Real steps = Real(c[decay_steps]);
    step = smaller(step, steps);
    const Real shrunk = rounded_power(Real(1) + step, Real(c[variance_decay]));
    const Real deviation = square_root(Real(c[initial_variance]) / shrunk);
    const Real noise = Real(normal(static_cast<unsigned long long>(c[seed]), count));
    const Real linear = (steps - step) / steps + times(noise, deviation);
    const Real waves = wave(times(times(Real(2), Real(c[num_periods])), step / steps));
    const Real decayed = times(Real(c[alpha]) + linear, waves) + Real(c[beta]);
    return times(Real(c[learning_rate]), decayed);
  }
};

struct OneCycle {
  enum { start, peak, end, warmup_steps, total_steps };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real top = Real(c[peak]);
    const Real warmup = Real(c[warmup_steps]);
    const Real total = Real(c[total_steps]);
    if (step < warmup) {
      return top + times(Real(c[start]) - top, wave(step / at_least_one(warmup)));
    }
    const Real falling = wave((smaller(step, total) - warmup) / (total - warmup));
    return Real(c[end]) + times(top - Real(c[end]), falling);
  }
};

struct WarmupStableDecay {
  enum { start, peak, end, warmup_steps, stable_steps, decay_steps };
  template <class Real>
  __device__ __forceinline__ static Real at(Real step, long long, const double* c) {
    const Real top = Real(c[peak]);
    const Real warmup = Real(c[warmup_steps]);
    if (step < warmup) {
      return Real(c[start]) + times(top - Real(c[start]), step / at_least_one(warmup));
    }
    const Real past = (step - warmup - Real(c[stable_steps])) / Real(c[decay_steps]);
    const Real remaining = Real(1) - (past > Real(0) ? smaller(past, Real(1)) : Real(0));
    return Real(c[end]) + times(top - Real(c[end]), remaining);
  }
};

// A formula's place in FORMULAS of gpuopt/rules/schedule_formulas.py.
template <class Formula>
constexpr int schedule_kind = -1;
template <>
constexpr int schedule_kind<LinearWarmup> = 0;
template <>
constexpr int schedule_kind<ExponentialDecay> = 1;
template <>
constexpr int schedule_kind<InverseTimeDecay> = 2;
template <>
constexpr int schedule_kind<PolynomialDecay> = 3;
template <>
constexpr int schedule_kind<PiecewiseConstant> = 4;
template <>
constexpr int schedule_kind<CosineDecay> = 5;
template <>
constexpr int schedule_kind<CosineDecayRestarts> = 6;
template <>
constexpr int schedule_kind<LinearCosineDecay> = 7;
template <>
constexpr int schedule_kind<NoisyLinearCosineDecay> = 8;
template <>
constexpr int schedule_kind<OneCycle> = 9;
template <>
constexpr int schedule_kind<WarmupStableDecay> = 10;

// The value of a schedule at a step; `form` is from `Schedule.device_form`: a kind, the number of
// constants, and the constants. After those of a warm-up stands the form of what follows it.
template <class Real>
__device__ Real schedule_at(const double* form, long long step) {
  int kind = static_cast<int>(form[0]);
  while (kind == schedule_kind<LinearWarmup>) {
    const double* c = form + 2;
    const long long warmup_steps = static_cast<long long>(c[LinearWarmup::warmup_steps]);
    if (step < warmup_steps) return LinearWarmup::at(Real(step), step, c);
    step -= warmup_steps;
    form += 2 + static_cast<int>(form[1]);
    kind = static_cast<int>(form[0]);
  }
  const double* c = form + 2;
  const Real at = Real(step);
  switch (kind) {
    case schedule_kind<ExponentialDecay>:
      return ExponentialDecay::at(at, step, c);
    case schedule_kind<InverseTimeDecay>:
      return InverseTimeDecay::at(at, step, c);
    case schedule_kind<PolynomialDecay>:
      return PolynomialDecay::at(at, step, c);
    case schedule_kind<PiecewiseConstant>:
      return PiecewiseConstant::at<Real>(step, c, static_cast<int>(form[1]));
    case schedule_kind<CosineDecay>:
      return CosineDecay::at(at, step, c);
    case schedule_kind<CosineDecayRestarts>:
      return CosineDecayRestarts::at(at, step, c);
    case schedule_kind<LinearCosineDecay>:
      return LinearCosineDecay::at(at, step, c);
    case schedule_kind<NoisyLinearCosineDecay>:
      return NoisyLinearCosineDecay::at(at, step, c);
    case schedule_kind<OneCycle>:
      return OneCycle::at(at, step, c);
    default:
      return WarmupStableDecay::at(at, step, c);
  }
}

}  // namespace gpuopt
