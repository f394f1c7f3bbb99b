// Whether a step is made, and what becomes of the loss scale: decided by the block that has added
// up all gradients, so that the host waits for nothing.
#pragma once
#include "norms.cuh"

namespace gpuopt {

// Returns a number itself, and NaN in the place of an infinite one.
template <class Real>
__device__ __forceinline__ Real nan_unless_finite(Real x) {
  return x + (x - x);
}

// What is wrong with a step's gradients, as a number that launches and devices take the least of:
// the number of a gradient that is not finite, or one of these.
constexpr double rows_are_refused = -1;

// The largest scale that grows, as in gpuopt/rules/loss_scaling.py.
constexpr float largest_grown_scale = 0x1p100f;

__device__ __forceinline__ const LossScaling& state_before(const LossDecision& decision) {
  return *reinterpret_cast<const LossScaling*>(decision.before);
}

// Returns the rule for gradients that are divided by the scale, which the host may not know: then
// it has given 0.
__device__ __forceinline__ ClipRule unscaling(const LossDecision& decision, const ClipRule& rule) {
  ClipRule by = rule;
  if (by.unscale == 0) by.unscale = state_before(decision).unscale;
  return by;
}

// Returns what gradients are within before they are divided by the scale, given what they are
// within after it; if the host knows the scale, it has given that already.
__device__ __forceinline__ double scaled(const LossDecision& decision, double bound,
                                         const ClipRule& rule) {
  return rule.unscale == 0 ? bound / state_before(decision).unscale : bound;
}

// Notes that a gradient of the launch is not finite. The word holds the complement of the least
// number: 0 before and after the launch.
__device__ __forceinline__ void note_bad(const LossDecision& decision, long long gradient) {
  const long long* every = reinterpret_cast<const long long*>(decision.numbers);
  const unsigned long long found = every == nullptr ? decision.number : every[gradient];
  atomicMax(reinterpret_cast<unsigned long long*>(decision.bad), ~found);
}

// Writes what is wrong after one launch more. Called by one thread, when all blocks are done.
__device__ __forceinline__ void take_bad(const LossDecision& decision, double* wrong, bool is_first,
                                         bool is_bad) {
  if (is_first) {
    const bool are_refused = *reinterpret_cast<const unsigned long long*>(decision.refused) != 0;
    *wrong = are_refused ? rows_are_refused : nothing_is_wrong;
  }
  if (is_bad) {
    unsigned long long* word = reinterpret_cast<unsigned long long*>(decision.bad);
    *wrong = lesser(*wrong, static_cast<double>(~atomicExch(word, 0ull)));
  }
}

__device__ __forceinline__ void change_scale(const LossDecision& decision, LossScaling& state,
                                             bool is_finite) {
  if (decision.incr_every == 0) return;
  if (is_finite && state.good_steps + 1 < decision.incr_every) {
    ++state.good_steps;
    return;
  }
  if (!is_finite && state.bad_steps + 1 < decision.decr_every) {
    state.good_steps = 0;
    ++state.bad_steps;
    return;
  }
  const float grown = state.loss_scale * static_cast<float>(decision.incr_ratio);
  const float shrunk = state.loss_scale * static_cast<float>(decision.decr_ratio) /
                       static_cast<float>(decision.divisor);
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
__device__ __forceinline__ void decide(const LossDecision& decision, const double* wrong,
                                       bool is_unusable) {
  const bool has_bad = *wrong != nothing_is_wrong;
  const bool is_finite = !has_bad && !is_unusable;
  LossScaling state = state_before(decision);
  if (*wrong == rows_are_refused || state.has_stopped != 0) {
    // Also on other devices, and in steps without such rows: until the host has heard of it.
    state.is_left_out = state.has_stopped = 1;
  } else {
    if (!is_finite) {
      state.has_stopped = decision.stops;
      state.last_bad_step = decision.step;
      state.first_bad = has_bad ? static_cast<long long>(*wrong) : -1;
    }
    change_scale(decision, state, is_finite);
    const bool is_accepted =
        decision.accept_after >= 0 && state.skipped_in_a_row >= decision.accept_after;
    if (is_finite) state.skipped_in_a_row = 0;
    state.is_left_out = !is_finite && !is_accepted;
    if (state.is_left_out) {
      ++state.num_skipped;
      ++state.skipped_in_a_row;
    } else {
      ++state.num_made;
    }
  }
  *reinterpret_cast<LossScaling*>(decision.after) = state;
}

}  // namespace gpuopt
