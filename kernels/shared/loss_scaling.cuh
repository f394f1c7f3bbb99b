// Whether a step is made, and what becomes of the loss scale: decided by the block that has added
// up all gradients, so that the host waits for nothing.
#pragma once
#include "norms.cuh"

namespace gpuopt {

// A loss scale after some step, and what it has seen: see `ScaleState` in
// gpuopt/rules/loss_scaling.py. Each step makes another. Mirrors `LossScaling` in
// gpuopt/backends/cuda/structs.py.
struct LossScaling {
  unsigned long long is_left_out;  // whether the step is; updates read it as they read a row flag
  long long num_made;              // how many steps were made
  long long good_steps;
  long long bad_steps;
  long long num_skipped;
  long long skipped_in_a_row;
  float loss_scale;
  float unscale;  // its reciprocal
};

// Returns a number itself, and NaN in the place of an infinite one.
template <class Real>
__device__ __forceinline__ Real nan_unless_finite(Real x) {
  return x + (x - x);
}

// What decides about a step. Mirrors `LossDecision` in gpuopt/backends/cuda/structs.py, and
// `ScaleRule` in gpuopt/rules/loss_scaling.py.
struct LossDecision {
  long long before;      // the address of LossScaling before the step
  long long after;       // the address of what is written
  long long refused;     // the address of the row flag
  long long incr_every;  // 0: the scale stays
  long long decr_every;
  long long accept_after;  // below 0: never
  double incr_ratio;
  double decr_ratio;
  double divisor;

  __device__ __forceinline__ const LossScaling& state_before() const {
    return *reinterpret_cast<const LossScaling*>(before);
  }

  // Returns the rule for gradients that are divided by the scale, which the host may not know: then
  // it has given 0.
  __device__ __forceinline__ ClipRule unscaling(const ClipRule& rule) const {
    ClipRule by = rule;
    if (by.unscale == 0) by.unscale = state_before().unscale;
    return by;
  }

  __device__ __forceinline__ void change_scale(LossScaling& state, bool is_finite) const {
    if (incr_every == 0) return;
    if (is_finite && state.good_steps + 1 < incr_every) {
      ++state.good_steps;
      return;
    }
    if (!is_finite && state.bad_steps + 1 < decr_every) {
      state.good_steps = 0;
      ++state.bad_steps;
      return;
    }
    const float grown = state.loss_scale * static_cast<float>(incr_ratio);
    const float shrunk =
        state.loss_scale * static_cast<float>(decr_ratio) / static_cast<float>(divisor);
    if (!is_finite) {
      state.loss_scale = shrunk < 1.0f ? 1.0f : shrunk;
    } else if (isfinite(grown)) {
      state.loss_scale = grown;
    }
    state.unscale = 1.0f / state.loss_scale;
    state.good_steps = state.bad_steps = 0;
  }

  // Writes what follows from sums of squares: they are NaN where a gradient is not finite. Called
  // by one thread.
  __device__ __forceinline__ void decide(const double* sums, long long num_norms) const {
    bool is_finite = true;
    for (long long norm = 0; norm < num_norms; ++norm) is_finite &= !isnan(sums[norm]);
    LossScaling state = state_before();
    if (*reinterpret_cast<const unsigned long long*>(refused) != 0) {
      state.is_left_out = 1;
    } else {
      change_scale(state, is_finite);
      const bool is_accepted = accept_after >= 0 && state.skipped_in_a_row >= accept_after;
      if (is_finite) state.skipped_in_a_row = 0;
      state.is_left_out = !is_finite && !is_accepted;
      if (state.is_left_out) {
        ++state.num_skipped;
        ++state.skipped_in_a_row;
      } else {
        ++state.num_made;
      }
    }
    *reinterpret_cast<LossScaling*>(after) = state;
  }
};

}  // namespace gpuopt
