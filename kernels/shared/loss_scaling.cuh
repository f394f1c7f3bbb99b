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
  long long last_bad_step;         // the number of the last one that was not finite; 0: none was
  long long first_bad;  // the number of its first gradient that was not; -1: a clipped one
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

// What is wrong with a step's gradients, as a number that launches and devices take the least of:
// the number of a gradient that is not finite, or one of these.
constexpr double rows_are_refused = -1;
constexpr double nothing_is_wrong = 0x1p53;

// The largest scale that grows, as in gpuopt/rules/loss_scaling.py.
constexpr float largest_grown_scale = 0x1p100f;

// What decides about a step. Mirrors `LossDecision` in gpuopt/backends/cuda/structs.py, and
// `ScaleRule` in gpuopt/rules/loss_scaling.py.
struct LossDecision {
  static constexpr bool decides = true;

  long long before;      // the address of LossScaling before the step
  long long after;       // the address of what is written
  long long refused;     // the address of the row flag
  long long bad;         // the address of a word: see `note_bad`
  long long numbers;     // the address of the numbers of the launch's gradients; 0 if it has one
  long long number;      // the only one's
  long long step;        // the step's own number, from 1
  long long incr_every;  // 0: the scale stays
  long long decr_every;
  long long accept_after;  // below 0: never
  long long stops;         // not 0: after a step that is not finite, none is made
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

  // Returns what gradients are within before they are divided by the scale, given what they are
  // within after it; if the host knows the scale, it has given that already.
  __device__ __forceinline__ double scaled(double bound, const ClipRule& rule) const {
    return rule.unscale == 0 ? bound / state_before().unscale : bound;
  }

  // Notes that a gradient of the launch is not finite. The word holds the complement of the least
  // number: 0 before and after the launch.
  __device__ __forceinline__ void note_bad(long long gradient) const {
    const long long* every = reinterpret_cast<const long long*>(numbers);
    const unsigned long long found = every == nullptr ? number : every[gradient];
    atomicMax(reinterpret_cast<unsigned long long*>(bad), ~found);
  }

  // Writes what is wrong after one launch more. Called by one thread, when all blocks are done.
  __device__ __forceinline__ void take_bad(double* wrong, bool is_first, bool is_bad) const {
    if (is_first) {
      const bool are_refused = *reinterpret_cast<const unsigned long long*>(refused) != 0;
      *wrong = are_refused ? rows_are_refused : nothing_is_wrong;
    }
    if (is_bad) {
      unsigned long long* word = reinterpret_cast<unsigned long long*>(bad);
      *wrong = lesser(*wrong, static_cast<double>(~atomicExch(word, 0ull)));
    }
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
    } else if (grown <= largest_grown_scale) {
      state.loss_scale = grown;
    }
    state.unscale = 1.0f / state.loss_scale;
    state.good_steps = state.bad_steps = 0;
  }

  // Writes what follows from what is wrong, or from a factor that would make gradients NaN. Called
  // by one thread.
  __device__ __forceinline__ void decide(const double* wrong, bool is_unusable) const {
    const bool has_bad = *wrong != nothing_is_wrong;
    const bool is_finite = !has_bad && !is_unusable;
    LossScaling state = state_before();
    const bool has_stopped = stops != 0 && state.last_bad_step != 0;
    if (*wrong == rows_are_refused || has_stopped) {
      state.is_left_out = 1;
    } else {
      if (!is_finite) {
        state.last_bad_step = step;
        state.first_bad = has_bad ? static_cast<long long>(*wrong) : -1;
      }
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
