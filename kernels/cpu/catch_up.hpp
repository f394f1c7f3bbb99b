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

// Precondition: there are sums. Inlined, as `late_row` is: of narrow rows, a tenth of the time went
// to what the calls returned in memory.
template <class Unnamed, class Real>
__attribute__((always_inline)) inline MissedSteps sums_of(const CatchUp<Unnamed, Real>& catch_up,
                                                          int last) {
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
    const auto rest = Decay<Real>::of(power_of(catch_up.powers[k], gap - made));
    for (long long i = 0; i < tile; ++i) columns.slot[k][i] = rest(columns.slot[k][i]);
  }
}

// A row that has missed steps.
template <class Unnamed, class Real>
struct LateRow {
  const CatchUp<Unnamed, Real>& catch_up;
  std::int32_t& last;  // how many steps it has made
  long long gap;       // how many it has missed; 0 if none
  MissedSteps missed;
  Decay<Real> decay[slot_capacity<typename Unnamed::Rule>];

  // Whether all missed steps are made one by one.
  bool is_stepped() const { return Unnamed::moves && catch_up.sums == nullptr; }

  // Notes that it is up to date.
  void note() const {
    if (gap > 0) last = static_cast<std::int32_t>(catch_up.now);
  }
};

template <class Unnamed, class Real>
__attribute__((always_inline)) inline LateRow<Unnamed, Real> late_row(
    const CatchUp<Unnamed, Real>& catch_up, long long row) {
  std::int32_t& last = catch_up.last[row];
  LateRow<Unnamed, Real> found{catch_up, last, catch_up.now - last, {}, {}};
  if (found.gap <= 0) return found;
  if (Unnamed::moves && !found.is_stepped()) found.missed = sums_of(catch_up, last);
  for (int k = 0; k < Unnamed::Rule::num_slots; ++k)
    found.decay[k] = Decay<Real>::of(power_of(catch_up.powers[k], found.gap));
  return found;
}

// Moves some columns of a late row, by sums or by steps one by one. Their variable is then the sum
// of `var` and `rest`, which is rounded when it is written; their slots have decayed.
template <class Unnamed, class Real>
void move_each_column(const LateRow<Unnamed, Real>& row, Real* var,
                      const Slots<typename Unnamed::Rule, Real>& slots, long long tile,
                      Real* rest) {
  using Rule = typename Unnamed::Rule;
  const Real epsilon = static_cast<Real>(row.catch_up.epsilon);
  const Real tolerance = static_cast<Real>(row.catch_up.tolerance);
  Columns<Rule, Real> columns;
  for (long long i = 0; i < tile; ++i) columns.var[i] = Real(0);
  for (int k = 0; k < Rule::num_slots; ++k)
    for (long long i = 0; i < tile; ++i) columns.slot[k][i] = slots.of[k][i];
  make_steps<Unnamed>(columns, tile, row.last, row.gap, row.catch_up);
  for (long long i = 0; i < tile; ++i) {
    Real value = var[i];
    const bool is_close = moved(row.missed, slots.of[Unnamed::average][i],
                                slots.of[Unnamed::square][i], epsilon, tolerance, value, rest[i]);
    if (is_close)
      var[i] = value;
    else
      rest[i] = columns.var[i];
    for (int k = 0; k < Rule::num_slots; ++k)
      slots.of[k][i] = is_close ? row.decay[k](slots.of[k][i]) : columns.slot[k][i];
  }
}

// Makes the steps one by one that some columns of a row have missed.
template <class Unnamed, class Real>
void step_columns(const LateRow<Unnamed, Real>& row, Real* var,
                  const Slots<typename Unnamed::Rule, Real>& slots, long long tile) {
  using Rule = typename Unnamed::Rule;
  Columns<Rule, Real> columns;
  for (long long i = 0; i < tile; ++i) columns.var[i] = var[i];
  for (int k = 0; k < Rule::num_slots; ++k)
    for (long long i = 0; i < tile; ++i) columns.slot[k][i] = slots.of[k][i];
  make_steps<Unnamed>(columns, tile, row.last, row.gap, row.catch_up);
  for (long long i = 0; i < tile; ++i) var[i] = columns.var[i];
  for (int k = 0; k < Rule::num_slots; ++k)
    for (long long i = 0; i < tile; ++i) slots.of[k][i] = columns.slot[k][i];
}

// Writes some columns of a late row, moved by sums; returns whether it did: not if any is to be
// stepped one by one. See `write_columns`.
template <class Unnamed, class Real, class Finish>
__attribute__((always_inline)) inline bool write_by_sums(
    const LateRow<Unnamed, Real>& row, Real* var, const Slots<typename Unnamed::Rule, Real>& slots,
    long long tile, const Finish& finish) {
  using Rule = typename Unnamed::Rule;
  const Real epsilon = static_cast<Real>(row.catch_up.epsilon);
  const Real tolerance = static_cast<Real>(row.catch_up.tolerance);
  const MissedSteps missed = row.missed;
  Decay<Real> decay[slot_capacity<Rule>];
  for (int k = 0; k < Rule::num_slots; ++k) decay[k] = row.decay[k];
  Columns<Rule, Real> columns;
  int any_left = 0;
  GPUOPT_INDEPENDENT
  for (long long i = 0; i < tile; ++i) {
    Real value = var[i], rest, slot[slot_capacity<Rule>];
    for (int k = 0; k < Rule::num_slots; ++k) slot[k] = slots.of[k][i];
    const bool is_close = moved(missed, slot[Unnamed::average], slot[Unnamed::square], epsilon,
                                tolerance, value, rest);
    any_left |= is_close ? 0 : 1;
    for (int k = 0; k < Rule::num_slots; ++k) {
      // These two are finite where the sums are close.
      const bool is_finite = k == Unnamed::average || k == Unnamed::square;
      slot[k] = is_finite ? decay[k].of_finite(slot[k]) : decay[k](slot[k]);
    }
    columns.var[i] = finish(i, value, rest, slot);
    for (int k = 0; k < Rule::num_slots; ++k) columns.slot[k][i] = slot[k];
  }
  if (any_left != 0) return false;
  for (long long i = 0; i < tile; ++i) var[i] = columns.var[i];
  for (int k = 0; k < Rule::num_slots; ++k)
    for (long long i = 0; i < tile; ++i) slots.of[k][i] = columns.slot[k][i];
  return true;
}

// Writes some columns of a late row once it is up to date. `finish(i, var, rest, slot)` returns the
// variable of column i, whose missed steps end at var + rest; it may write to its slots, which have
// decayed.
template <class Unnamed, class Real, class Finish>
__attribute__((always_inline)) inline void write_columns(
    const LateRow<Unnamed, Real>& row, Real* var, const Slots<typename Unnamed::Rule, Real>& slots,
    long long tile, const Finish& finish) {
  using Rule = typename Unnamed::Rule;
  // Rows of embeddings are often this narrow, and a loop of known length has no remainder loop.
  constexpr long long narrow = 16;
  if (tile == narrow ? write_by_sums(row, var, slots, narrow, finish)
                     : write_by_sums(row, var, slots, tile, finish))
    return;
  Real rest[tile_width];
  move_each_column(row, var, slots, tile, rest);
  for (long long i = 0; i < tile; ++i) {
    Real slot[slot_capacity<Rule>];
    for (int k = 0; k < Rule::num_slots; ++k) slot[k] = slots.of[k][i];
    var[i] = finish(i, var[i], rest[i], slot);
    for (int k = 0; k < Rule::num_slots; ++k) slots.of[k][i] = slot[k];
  }
}

// Brings some columns of a row up to date.
template <class Unnamed, class Real>
GPUOPT_WIDEST_REGISTERS void bring_up_columns(const LateRow<Unnamed, Real>& row, Real* var,
                                              const Slots<typename Unnamed::Rule, Real>& slots,
                                              long long tile) {
  if constexpr (Unnamed::moves) {
    if (row.is_stepped()) return step_columns(row, var, slots, tile);
    const auto sum = [](long long, Real value, Real rest, Real*) { return value + rest; };
    write_columns(row, var, slots, tile, sum);
  } else {
    // Numbers that are no longer the row's: where a write to a slot might change its decay, GCC 12
    // uses no vectors.
    for (int k = 0; k < Unnamed::Rule::num_slots; ++k) {
      const Decay<Real> decay = row.decay[k];
      Real* const slot = slots.of[k];
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < tile; ++i) slot[i] = decay(slot[i]);
    }
  }
}

// Steps some columns of a late row, which are written once.
template <class Rule, class Shift, class Unnamed, class Real>
GPUOPT_WIDEST_REGISTERS void update_columns(const LateRow<Unnamed, Real>& row, Real* var,
                                            const Slots<typename Unnamed::Rule, Real>& slots,
                                            const Real* grad, long long tile, long long number,
                                            typename Rule::template Scalars<Real> scalars) {
  if constexpr (Unnamed::moves) {
    const auto step = [&](long long i, Real value, Real rest, Real* slot) {
      const Real own = Rule::gradient(grad[i], number + i, slot, scalars);
      Shift::template apply<Rule>(value, rest, own, slot, scalars);
      return value;
    };
    write_columns(row, var, slots, tile, step);
  } else {
    Decay<Real> decay[slot_capacity<Rule>];
    for (int k = 0; k < Rule::num_slots; ++k) decay[k] = row.decay[k];
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i) {
      Real value = var[i], slot[slot_capacity<Rule>];
      for (int k = 0; k < Rule::num_slots; ++k) slot[k] = decay[k](slots.of[k][i]);
      Rule::apply(value, Rule::gradient(grad[i], number + i, slot, scalars), slot, scalars);
      var[i] = value;
      for (int k = 0; k < Rule::num_slots; ++k) slots.of[k][i] = slot[k];
    }
  }
}

// For `update_rows`: rows make the steps first that they have missed.
template <class Unnamed, class Shift, class Real>
struct LateTable {
  const CatchUp<Unnamed, Real>& catch_up;

  struct Row : LateRow<Unnamed, Real> {
    template <class Rule>
    __attribute__((always_inline)) void update(
        Real* var, const Slots<Rule, Real>& slots, const Real* grad, long long tile,
        long long number, const typename Rule::template Scalars<Real>& scalars) const {
      static_assert(Rule::num_slots == Unnamed::Rule::num_slots, "of the same slots");
      if (this->gap > 0) {
        Slots<typename Unnamed::Rule, Real> own{};
        for (int k = 0; k < Rule::num_slots; ++k) own.of[k] = slots.of[k];
        if (!this->is_stepped())
          return update_columns<Rule, Shift>(*this, var, own, grad, tile, number, scalars);
        step_columns(*this, var, own, tile);
      }
      RowUpToDate().update<Rule>(var, slots, grad, tile, number, scalars);
    }
    void end() const { this->note(); }
  };

  void prefetch(long long row) const { __builtin_prefetch(catch_up.last + row, 1, 2); }
  Row at(long long row) const { return {late_row(catch_up, row)}; }
};

// Brings a row up to date, and its number of steps.
template <class Unnamed, class Real>
void bring_up_row(Real* const* written, long long row, long long width,
                  const CatchUp<Unnamed, Real>& catch_up) {
  const LateRow<Unnamed, Real> found = late_row(catch_up, row);
  if (found.gap <= 0) return;
  for (long long left = 0; left < width; left += tile_width) {
    const long long offset = row * width + left;
    bring_up_columns(found, written[0] + offset, slots_at<typename Unnamed::Rule>(written, offset),
                     tile_at(left, width));
  }
  found.note();
}

// Does the same where arrays are stored by codecs.
template <class Update, class Unnamed, class Real>
void bring_up_stored_row(void* const* arrays, long long row, long long width,
                         const typename Update::Scalars& scalars,
                         const CatchUp<Unnamed, Real>& catch_up) {
  const LateRow<Unnamed, Real> found = late_row(catch_up, row);
  if (found.gap <= 0) return;
  for (long long left = 0; left < width; left += Update::most_columns) {
    typename Update::Columns columns(arrays, Update::place_of(row, left, width),
                                     Update::columns_at(left, width));
    for (long long at = 0; at < columns.size; at += tile_width)
      bring_up_columns(found, columns.var + at,
                       columns.template slots_from<typename Unnamed::Rule>(at),
                       tile_at(at, columns.size));
    columns.store(scalars);
  }
  found.note();
}

// Brings rows[first] to rows[last - 1] up to date, or rows first to last - 1 if `rows` is nullptr.
// `Update` is the one of this table's arrays; of its scalars, only a key of random bits is read.
template <class Update, class Unnamed, class Real>
void bring_up_rows(void* const* arrays, long long width, const long long* rows, long long first,
                   long long last, typename Update::Scalars scalars,
                   const CatchUp<Unnamed, Real>& catch_up) {
  const auto row_at = [=](long long at) { return rows == nullptr ? at : rows[at]; };
  if constexpr (Update::is_in_place) {
    const typename Update::InPlace written(arrays);
    for (long long at = first; at < last; ++at) {
      if (at + rows_ahead < last)
        for (Real* const array : written.of)
          prefetch(array + row_at(at + rows_ahead) * width, width);
      bring_up_row(written.of, row_at(at), width, catch_up);
    }
  } else {
    for (long long at = first; at < last; ++at)
      bring_up_stored_row<Update>(arrays, row_at(at), width, scalars, catch_up);
  }
}

// Updates rows after the steps that they have missed; see `update_rows` in update.hpp for the
// arguments.
template <class Rule, class Update, class Shift, class Unnamed, class Real>
void update_late_rows(void* const* arrays, long long width, const Real* values,
                      const long long* rows, const long long* positions, const long long* begins,
                      const long long* firsts, long long first, long long last,
                      long long first_number, typename Update::Scalars scalars,
                      const CatchUp<Unnamed, Real>& catch_up) {
  const LateTable<Unnamed, Shift, Real> table = {catch_up};
  if constexpr (Update::is_in_place) {
    const typename Update::InPlace written(arrays);
    update_rows<Rule>(written.of, width, values, rows, positions, begins, firsts, first, last,
                      first_number, scalars, table);
  } else {
    for (long long at = first; at < last; ++at) {
      const RowValues<Real> mine = {width,      values,         positions,
                                    begins[at], begins[at + 1], firsts[at]};
      const auto found = table.at(rows[at]);
      for (long long left = 0; left < width; left += Update::most_columns) {
        const Place place = Update::place_of(rows[at], left, width);
        typename Update::Columns columns(arrays, place, Update::columns_at(left, width));
        Real sums[Update::most_columns];
        Update::sum_columns(mine, left, columns.size, sums);
        for (long long tile = 0; tile < columns.size; tile += tile_width)
          found.template update<Rule>(columns.var + tile, columns.template slots_from<Rule>(tile),
                                      sums + tile, tile_at(tile, columns.size),
                                      first_number + place.element + tile, scalars);
        columns.store(scalars);
      }
      found.end();
    }
  }
}

}  // namespace gpuopt
