// Rows of a table that missed steps are brought up to date, in host memory. Threads call this for
// different rows.
// Precondition: the variable and its slots share no memory.
#pragma once
#include "../shared/catch_up.cuh"
#include "update.hpp"

// Of processors with registers of 512 bits, GCC uses those of 256: to bring up a table took 1.4
// times as long, as it computes longer than it waits for memory.
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define GPUOPT_WIDEST_REGISTERS __attribute__((target("prefer-vector-width=512")))
#else
#define GPUOPT_WIDEST_REGISTERS
#endif

namespace gpuopt {

// Powers of a decay: low[i] = decay^i, and high[i] = decay^(size * i).
constexpr int powers_at_once = 128;
struct Powers {
  double low[powers_at_once], high[powers_at_once];
  double decay;
};

inline double power_of(const Powers& powers, long long exponent) {
  const long long high = exponent / powers_at_once;
  if (high >= powers_at_once) return power(powers.decay, static_cast<double>(exponent));
  return powers.high[high] * powers.low[exponent % powers_at_once];
}

// Mirrors `_CatchUp` in gpuopt/backends/cpu/forms/compiled_catch_up.py.
template <class Unnamed, class Real>
struct CatchUp {
  std::int32_t* last;       // of each row: how many steps it has made
  const Real* steps;        // the step size of each step
  const MissedSteps* sums;  // of each `sums_stride` steps, or nullptr
  const Powers* powers;     // of each slot's decay
  const typename Unnamed::Rule::template Scalars<Real>* scalars;
  long long now, window;
  double tolerance, epsilon;
  OneEarlier one_earlier;
};

// Precondition: there are sums.
template <class Unnamed, class Real>
MissedSteps sums_of(const CatchUp<Unnamed, Real>& catch_up, int last) {
  MissedSteps sums = catch_up.sums[next_sums(last)];
  go_back(sums, last, catch_up.now, catch_up.one_earlier,
          [&](int step) { return catch_up.steps[step]; });
  return sums;
}

// Columns of a row, while they are brought up to date.
template <class Rule, class Real>
struct Columns {
  Real var[tile_width];
  Real slot[slot_capacity<Rule>][tile_width];
};

// Makes missed steps one by one, as many as move anything.
template <class Unnamed, class Real>
void make_steps(Columns<typename Unnamed::Rule, Real>& columns, long long tile, long long last,
                long long gap, const CatchUp<Unnamed, Real>& catch_up) {
  using Rule = typename Unnamed::Rule;
  auto scalars = *catch_up.scalars;
  const long long made = gap < catch_up.window ? gap : catch_up.window;
  for (long long step = 0; step < made; ++step) {
    Unnamed::template set_step_size<Real>(scalars, catch_up.steps[last + step]);
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i) {
      Real slot[slot_capacity<Rule>];
      for (int k = 0; k < Rule::num_slots; ++k) slot[k] = columns.slot[k][i];
      Rule::apply(columns.var[i], Real(0), slot, scalars);
      for (int k = 0; k < Rule::num_slots; ++k) columns.slot[k][i] = slot[k];
    }
  }
  for (int k = 0; k < Rule::num_slots; ++k) {
    const Real rest = static_cast<Real>(power_of(catch_up.powers[k], gap - made));
    for (long long i = 0; i < tile; ++i) columns.slot[k][i] *= rest;
  }
}

template <class Unnamed, class Real>
GPUOPT_WIDEST_REGISTERS void bring_up_tile(Real* const* written, long long offset, long long tile,
                                           long long last, long long gap, const Real* decay,
                                           const CatchUp<Unnamed, Real>& catch_up) {
  using Rule = typename Unnamed::Rule;
  Real* const var = written[0] + offset;
  const Slots<Rule, Real> slots = slots_at<Rule>(written, offset);
  if constexpr (Unnamed::moves) {
    const Real* const average = slots.of[Unnamed::average];
    const Real* const square = slots.of[Unnamed::square];
    Real result[tile_width];
    // An integer, as floating-point numbers are added up one by one.
    int is_late[tile_width];
    int late = 0;
    if (catch_up.sums != nullptr) {
      const MissedSteps missed = sums_of(catch_up, static_cast<int>(last));
      const Real epsilon = static_cast<Real>(catch_up.epsilon);
      const Real tolerance = static_cast<Real>(catch_up.tolerance);
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < tile; ++i) {
        const bool is_close =
            moved(missed, var[i], average[i], square[i], epsilon, tolerance, result[i]);
        is_late[i] = is_close ? 0 : 1;
      }
      for (long long i = 0; i < tile; ++i) late |= is_late[i];
    } else {
      for (long long i = 0; i < tile; ++i) is_late[i] = late = 1;
    }
    if (late != 0) {
      Columns<Rule, Real> columns;
      for (long long i = 0; i < tile; ++i) columns.var[i] = var[i];
      for (int k = 0; k < Rule::num_slots; ++k)
        for (long long i = 0; i < tile; ++i) columns.slot[k][i] = slots.of[k][i];
      make_steps<Unnamed>(columns, tile, last, gap, catch_up);
      for (long long i = 0; i < tile; ++i) {
        const bool is_one_by_one = is_late[i] != 0;
        var[i] = is_one_by_one ? columns.var[i] : result[i];
        for (int k = 0; k < Rule::num_slots; ++k)
          slots.of[k][i] = is_one_by_one ? columns.slot[k][i] : slots.of[k][i] * decay[k];
      }
      return;
    }
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i) var[i] = result[i];
  }
  // Loops of their own: in one with what comes before, GCC 12 uses no vectors.
  for (int k = 0; k < Rule::num_slots; ++k) {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i) slots.of[k][i] *= decay[k];
  }
}

// Brings a row up to date, and its number of steps.
template <class Unnamed, class Real>
void bring_up_row(Real* const* written, long long row, long long width,
                  const CatchUp<Unnamed, Real>& catch_up) {
  const std::int32_t last = catch_up.last[row];
  const long long gap = catch_up.now - last;
  if (gap <= 0) return;
  using Rule = typename Unnamed::Rule;
  Real decay[slot_capacity<Rule>];
  for (int k = 0; k < Rule::num_slots; ++k)
    decay[k] = static_cast<Real>(power_of(catch_up.powers[k], gap));
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = width - left < tile_width ? width - left : tile_width;
    bring_up_tile(written, row * width + left, tile, last, gap, decay, catch_up);
  }
  catch_up.last[row] = static_cast<std::int32_t>(catch_up.now);
}

// For `update_rows`: rows are brought up to date first.
template <class Unnamed, class Real>
struct BroughtUp {
  Real* const* written;
  long long width;
  const CatchUp<Unnamed, Real>& catch_up;

  void prefetch(long long row) const { __builtin_prefetch(catch_up.last + row, 1, 2); }
  void prepare(long long row) const { bring_up_row(written, row, width, catch_up); }
};

// Brings rows[first] to rows[last - 1] up to date, or rows first to last - 1 if `rows` is nullptr.
template <class Unnamed, class Real>
void bring_up_rows(Real* const* written, long long width, const long long* rows, long long first,
                   long long last, const CatchUp<Unnamed, Real>& catch_up) {
  using Rule = typename Unnamed::Rule;
  for (long long at = first; at < last; ++at) {
    if (at + rows_ahead < last) {
      const long long next = rows == nullptr ? at + rows_ahead : rows[at + rows_ahead];
      for (int k = 0; k <= Rule::num_slots; ++k) prefetch(written[k] + next * width, width);
    }
    bring_up_row(written, rows == nullptr ? at : rows[at], width, catch_up);
  }
}

}  // namespace gpuopt
