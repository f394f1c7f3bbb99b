// Dense and sparse updates in host memory: the loops around a rule where the compiler is the
// machine's own. Threads call them for different chunks or rows.
// Precondition: the arrays of an update share no memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../shared/constants.cuh"
#include "../shared/element.cuh"
#include "../shared/rounding.cuh"
#include "../shared/row_wise.cuh"
#include "../shared/rule.cuh"
#include "codecs.hpp"

namespace gpuopt {

// Columns that are summed at a time: the sums stay in registers or the first-level cache.
constexpr long long tile_width = 64;

// Rows of up to so many columns have loops of their own: 2 to 4 columns then take a sixth of the
// time.
constexpr int most_narrow_columns = 8;

// Rows lie anywhere in a table, so each is prefetched this many rows before it is used: into the
// second-level cache, which has room for as many.
constexpr long long rows_ahead = 32;

inline long long tile_at(long long left, long long width) {
  return width - left < tile_width ? width - left : tile_width;
}

template <class Real>
void prefetch(const Real* row, long long width) {
  constexpr long long line = 64 / sizeof(Real);
  for (long long i = 0; i < width && i < 8 * line; i += line) __builtin_prefetch(row + i, 0, 2);
}

template <class Rule, class Real>
Slots<Rule, Real> slots_at(Real* const* written, long long offset) {
  Slots<Rule, Real> slots{};
  for (int k = 0; k < Rule::num_slots; ++k) slots.of[k] = written[1 + k] + offset;
  return slots;
}

// Updates one element of arrays of the type that rules compute in; `number` is its number in its
// variable. `inline`: else GCC calls it for each element of longer rules, and uses no vectors.
template <class Rule, class Real>
inline void update_element(Real* var, const Slots<Rule, Real>& slots, long long at, Real grad,
                           long long number, const typename Rule::template Scalars<Real>& scalars) {
  Real value = var[at];
  Real slot[slot_capacity<Rule>];
  for (int k = 0; k < Rule::num_slots; ++k) slot[k] = slots.of[k][at];
  Rule::apply(value, Rule::gradient(grad, number, slot, scalars), slot, scalars);
  Rule::follow(value, slot, scalars);
  if (writes_var<Rule>) var[at] = value;
  for (int k = 0; k < Rule::num_slots; ++k)
    if (writes_slot<Rule>(k)) slots.of[k][at] = slot[k];
}

// Returns the square of the gradient that a row-wise rule computes with, of element `at`. Nothing
// is written.
template <class Rule, class Real>
inline Real squared(const Slots<OfRow<Rule>, Real>& slots, long long at, Real grad,
                    long long number, const typename Rule::template Scalars<Real>& scalars) {
  Real slot[slot_capacity<Rule>];
  if constexpr (Rule::has_gradient_slots)
    for (int k = 0; k < OfRow<Rule>::num_slots; ++k) slot[k] = slots.of[k][at];
  const Real seen = Rule::gradient(grad, number, slot, scalars);
  return seen * seen;
}

// Adds up the squares of a row; `number` is that of its first element, and `slots` are its.
// `gradient_at(left, tile)` returns the address of `tile` columns from `left` on.
template <class Rule, class Real, class GradientAt>
__attribute__((always_inline)) inline Real sum_of_squares(
    const Slots<OfRow<Rule>, Real>& slots, long long width, long long number,
    const GradientAt& gradient_at, const typename Rule::template Scalars<Real>& scalars) {
  // Several sums, in one order, so that several additions may run in one instruction.
  constexpr int lanes = 16;
  if (width <= lanes) {  // the same order, as each lane has one square
    const Real* const gradient = gradient_at(0, width);
    Real sum = squared<Rule>(slots, 0, gradient[0], number, scalars);
    for (long long i = 1; i < width; ++i)
      sum += squared<Rule>(slots, i, gradient[i], number + i, scalars);
    return sum;
  }
  Real squares[lanes] = {};
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = tile_at(left, width);
    const Real* const gradient = gradient_at(left, tile);
    long long i = 0;
    for (; i + lanes <= tile; i += lanes)
      for (int lane = 0; lane < lanes; ++lane) {
        const long long at = left + i + lane;
        squares[lane] += squared<Rule>(slots, at, gradient[i + lane], number + at, scalars);
      }
    for (; i < tile; ++i)
      squares[i % lanes] += squared<Rule>(slots, left + i, gradient[i], number + left + i, scalars);
  }
  for (int lane = 1; lane < lanes; ++lane) squares[0] += squares[lane];
  return squares[0];
}

// Updates one row by a row-wise rule. See `sum_of_squares` for `number` and `gradient_at`.
template <class Rule, class Real, class GradientAt>
__attribute__((always_inline)) inline void update_whole_row(
    Real* const* written, long long row, long long width, long long number,
    const GradientAt& gradient_at, const typename Rule::template Scalars<Real>& scalars) {
  constexpr int first = OfRow<Rule>::num_slots;
  typename OfRow<Rule>::template Scalars<Real> of_row;
  static_cast<typename Rule::template Scalars<Real>&>(of_row) = scalars;
  const Slots<OfRow<Rule>, Real> every = slots_at<OfRow<Rule>>(written, row * width);
  of_row.mean_square =
      sum_of_squares<Rule>(every, width, number, gradient_at, scalars) / static_cast<Real>(width);
  for (int k = 0; k < Rule::num_row_slots; ++k) of_row.row_slot[k] = written[1 + first + k][row];
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = tile_at(left, width);
    const Real* const gradient = gradient_at(left, tile);
    const long long offset = row * width + left;
    Real* const var = written[0] + offset;
    const Slots<OfRow<Rule>, Real> slots = slots_at<OfRow<Rule>>(written, offset);
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i)
      update_element<OfRow<Rule>>(var, slots, i, gradient[i], number + left + i, of_row);
  }
  OfRow<Rule>::update_row_slots(of_row);
  for (int k = 0; k < Rule::num_row_slots; ++k) written[1 + first + k][row] = of_row.row_slot[k];
}

// Updates narrow rows by a row-wise rule. The compiler knows how wide they are, and computes
// several rows in one instruction. A row's squares are added up in the order of `sum_of_squares`.
template <int width, class Rule, class Real>
void update_narrow_rows(Real* const* written, const Real* grad, long long num_rows,
                        long long number, const typename Rule::template Scalars<Real>& scalars) {
  constexpr int first = OfRow<Rule>::num_slots;
  Real* const var = written[0];
  const Slots<OfRow<Rule>, Real> slots = slots_at<OfRow<Rule>>(written, 0);
  Real* row_slots[Rule::num_row_slots];
  for (int k = 0; k < Rule::num_row_slots; ++k) row_slots[k] = written[1 + first + k];
  typename OfRow<Rule>::template Scalars<Real> of_chunk;
  static_cast<typename Rule::template Scalars<Real>&>(of_chunk) = scalars;
  GPUOPT_INDEPENDENT
  for (long long row = 0; row < num_rows; ++row) {
    const long long at = row * width;
    Real squares = squared<Rule>(slots, at, grad[at], number + at, scalars);
    for (int i = 1; i < width; ++i)
      squares += squared<Rule>(slots, at + i, grad[at + i], number + at + i, scalars);
    auto of_row = of_chunk;
    of_row.mean_square = squares / Real(width);
    for (int k = 0; k < Rule::num_row_slots; ++k) of_row.row_slot[k] = row_slots[k][row];
    for (int i = 0; i < width; ++i)
      update_element<OfRow<Rule>>(var, slots, at + i, grad[at + i], number + at + i, of_row);
    OfRow<Rule>::update_row_slots(of_row);
    for (int k = 0; k < Rule::num_row_slots; ++k) row_slots[k][row] = of_row.row_slot[k];
  }
}

// Updates whole rows by a row-wise rule; they are no narrower than `narrow`.
template <int narrow = 1, class Rule, class Real>
void update_whole_rows(Real* const* written, const Real* grad, long long num_rows, long long width,
                       long long number, const typename Rule::template Scalars<Real>& scalars) {
  if constexpr (narrow <= most_narrow_columns) {
    if (width == narrow)
      update_narrow_rows<narrow, Rule>(written, grad, num_rows, number, scalars);
    else
      update_whole_rows<narrow + 1, Rule>(written, grad, num_rows, width, number, scalars);
  } else {
    for (long long row = 0; row < num_rows; ++row) {
      const auto gradient_at = [=](long long left, long long) { return grad + row * width + left; };
      update_whole_row<Rule>(written, row, width, number + row * width, gradient_at, scalars);
    }
  }
}

// The values of a row, some columns at a time: those at positions[begin] to positions[end - 1], of
// which the first one is the sorted position `first` of the call.
template <class Real>
struct RowValues {
  long long width;
  const Real* values;
  const long long* positions;
  long long begin, end, first;

  const Real* at(long long k, long long left) const { return values + positions[k] * width + left; }
};

// Adds up `tile` columns from `left` on, of the values from `begin` to before `end`, one by one.
template <class Real>
__attribute__((always_inline)) inline void sum_one_by_one(const RowValues<Real>& row,
                                                          long long begin, long long end,
                                                          long long left, long long tile,
                                                          Real* sum) {
  const Real* value = row.at(begin, left);
  for (long long i = 0; i < tile; ++i) sum[i] = value[i];
  for (long long k = begin + 1; k < end; ++k) {
    value = row.at(k, left);
    for (long long i = 0; i < tile; ++i) sum[i] += value[i];
  }
}

inline long long end_of_part(long long first, long long end, long long size) {
  const long long part_end = first + size - first % size;
  return part_end < end ? part_end : end;
}

// Does what `sum_one_by_one` does, of the values from sorted position `first` on, for rows of
// several pieces. `known_tile` is `tile` where the compiler is to know it, and else 0.
template <long long known_tile, class Real>
__attribute__((noinline)) void sum_one_piece(const RowValues<Real>& row, long long first,
                                             long long end, long long left, long long tile,
                                             Real* sum) {
  if (known_tile > 0) tile = known_tile;
  const long long apart = row.begin - row.first;
  Real total[tile_width];  // no other memory, as the compiler knows
  sum_one_by_one(row, first + apart, end + apart, left, tile, total);
  for (long long i = 0; i < tile; ++i) sum[i] = total[i];
}

// Adds up the values from sorted position `first` to before `end` by parts: by the pieces of a
// stretch, or by stretches.
template <bool by_pieces, class Real>
__attribute__((noinline)) void sum_by_parts(const RowValues<Real>& row, long long first,
                                            long long end, long long left, long long tile,
                                            Real* sum) {
  Real part[tile_width];
  Real* to = sum;
  while (first < end) {
    const long long begin = first;
    first = end_of_part(begin, end, by_pieces ? piece_size : stretch_size);
    if constexpr (!by_pieces)
      sum_by_parts<true>(row, begin, first, left, tile, to);
    else if (tile == tile_width)
      sum_one_piece<tile_width>(row, begin, first, left, tile, to);
    else
      sum_one_piece<0>(row, begin, first, left, tile, to);
    if (to == part)
      for (long long i = 0; i < tile; ++i) sum[i] += part[i];
    to = part;
  }
}

// Adds up the values of a row that has several pieces.
template <class Real>
void sum_pieces(const RowValues<Real>& row, long long left, long long tile, Real* sum) {
  sum_by_parts<false>(row, row.first, row.first + (row.end - row.begin), left, tile, sum);
}

// Whether a row's values are added up one by one: those of one piece, and two wherever they stand.
template <class Real>
__attribute__((always_inline)) inline bool is_one_piece(const RowValues<Real>& row) {
  const long long count = row.end - row.begin;
  return count <= 2 || row.first % piece_size + count <= piece_size;
}

// Adds up `tile` columns of a row's values, from `left` on, and returns where the sum is: one value
// is its own. Precondition: is_one_piece(row).
template <class Real>
__attribute__((always_inline)) inline const Real* sum_piece(const RowValues<Real>& row,
                                                            long long left, long long tile,
                                                            Real* sum) {
  const Real* values = row.at(row.begin, left);
  if (row.end - row.begin > 1) {  // GCC makes a slower loop of an early return
    sum_one_by_one(row, row.begin, row.end, left, tile, sum);
    values = sum;
  }
  return values;
}

// Does what `sum_piece` does for any row, in the order of gpuopt/backends/row_order.py.
template <class Real>
__attribute__((always_inline)) inline const Real* sum_values(const RowValues<Real>& row,
                                                             long long left, long long tile,
                                                             Real* sum) {
  if (is_one_piece(row)) return sum_piece(row, left, tile, sum);
  sum_pieces(row, left, tile, sum);
  return sum;
}

// Updates some columns of one row that has several pieces; see `update_tile`.
template <class Rule, class Real, class Row>
__attribute__((noinline, noclone)) void update_by_pieces(
    const Row& row, Real* var, const Slots<Rule, Real>& slots, const RowValues<Real>& values,
    long long left, long long tile, long long number,
    const typename Rule::template Scalars<Real>& scalars) {
  Real sum[tile_width];
  sum_pieces(values, left, tile, sum);
  row.template update<Rule>(var, slots, sum, tile, number, scalars);
}

// Updates some columns of one row, from `left` on, by the sum of its values. The variable and the
// slots begin at the first of these columns, and `number` is that of its element; see `update_rows`
// for the row. Inlined: where the compiler knows `tile`, it leaves out everything for other widths.
// Rows of several pieces have a function of their own: if their sum were `sum`, the compiler would
// keep no other sum in registers.
template <class Rule, class Real, class Row>
__attribute__((always_inline)) inline void update_tile(
    const Row& row, Real* var, const Slots<Rule, Real>& slots, const RowValues<Real>& values,
    long long left, long long tile, long long number,
    const typename Rule::template Scalars<Real>& scalars) {
  if (!is_one_piece(values))
    return update_by_pieces<Rule, Real>(row, var, slots, values, left, tile, number, scalars);
  Real sum[tile_width];
  const Real* const grad = sum_piece(values, left, tile, sum);
  row.template update<Rule>(var, slots, grad, tile, number, scalars);
}

// Updates rows[first] to rows[last - 1]. Row k receives the sum of the values at
// positions[begins[k]] to positions[begins[k + 1] - 1]; firsts[k] is the first one's sorted
// position of the call. `table.prefetch` is called some rows ahead, and `table.at` returns a row
// that is about to be updated: its `update` is called with each tile, and its `end` after the last.
template <class Rule, class Real, class Table>
void update_rows(Real* const* written, long long width, const Real* values, const long long* rows,
                 const long long* positions, const long long* begins, const long long* firsts,
                 long long first, long long last, long long first_number,
                 typename Rule::template Scalars<Real> scalars, const Table& table) {
  for (long long row = first; row < last; ++row) {
    if (row + rows_ahead < last) {
      const long long next = row + rows_ahead;
      prefetch(values + positions[begins[next]] * width, width);
      for (int k = 0; k <= Rule::num_slots - Rule::num_row_slots; ++k)
        prefetch(written[k] + rows[next] * width, width);
      table.prefetch(rows[next]);
    }
    const RowValues<Real> mine = {width,       values,          positions,
                                  begins[row], begins[row + 1], firsts[row]};
    if constexpr (Rule::num_row_slots > 0) {
      Real sum[tile_width];
      long long summed = -1;
      const auto gradient_at = [&](long long left, long long tile) -> const Real* {
        if (left == summed) return sum;
        const Real* const gradient = sum_values(mine, left, tile, sum);
        if (gradient == sum) summed = left;
        return gradient;
      };
      update_whole_row<Rule>(written, rows[row], width, first_number + rows[row] * width,
                             gradient_at, scalars);
      continue;
    }
    const auto found = table.at(rows[row]);
    for (long long left = 0; left < width; left += tile_width) {
      const long long offset = rows[row] * width + left;
      Real* const var = written[0] + offset;
      const Slots<Rule, Real> slots = slots_at<Rule>(written, offset);
      const auto update = [&](long long tile) __attribute__((always_inline)) {
        update_tile<Rule>(found, var, slots, mine, left, tile, first_number + offset, scalars);
      };
      if (left + tile_width <= width)
        update(tile_width);
      else
        update(width - left);
    }
    found.end();
  }
}

// Rows that are up to date, or some columns of them.
struct RowUpToDate {
  template <class Rule, class Real>
  __attribute__((always_inline)) void update(
      Real* var, const Slots<Rule, Real>& slots, const Real* grad, long long tile, long long number,
      const typename Rule::template Scalars<Real>& scalars) const {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i)
      update_element<Rule>(var, slots, i, grad[i], number + i, scalars);
  }
  void end() const {}
};
struct TableUpToDate {
  void prefetch(long long) const {}
  RowUpToDate at(long long) const { return {}; }
};

template <class Rule, class Real>
void update_rows(Real* const* written, long long width, const Real* values, const long long* rows,
                 const long long* positions, const long long* begins, const long long* firsts,
                 long long first, long long last, long long first_number,
                 const typename Rule::template Scalars<Real>& scalars) {
  update_rows<Rule>(written, width, values, rows, positions, begins, firsts, first, last,
                    first_number, scalars, TableUpToDate{});
}

// The update of arrays that are stored by codecs.
template <class Rule, class Real, class Gradient, class Var, class... Slot>
struct Update {
  static_assert(sizeof...(Slot) == Rule::num_slots, "each slot has a codec");
  using Scalars = typename Rule::template Scalars<Real>;
  static constexpr int num_arrays = (Var::num_arrays + ... + Slot::num_arrays);
  // Of all slots with codes.
  static constexpr int per_block = std::max({0, Slot::per_block...});
  static_assert(((Slot::per_block == 0 || Slot::per_block == per_block) && ...), "one size");
  static constexpr bool is_in_place =
      (Gradient::is_in_place && Var::is_in_place) && (true && ... && Slot::is_in_place);

  // Rows that follow each other: of the arrays of the variable's codec, then of those of the
  // slots'. A gradient at nullptr is zero. If neither the rule nor a codec goes by rows, a chunk
  // may be divided into rows in any way.
  struct Chunk {
    void* arrays[num_arrays];
    const void* grad;
    std::intptr_t num_rows;
    std::intptr_t width;
    std::intptr_t first;         // the place of the first element in its variable
    std::intptr_t first_number;  // of the variable's first element, for stages of the gradient
    std::intptr_t group;         // of its scalars
  };

  // Updates chunks until all are taken. Threads that call it at once share them; `taken` counts for
  // all of them, from 0. The gradients of the first `num_joined` are in `joined`, each as many
  // bytes from its begin as `grad` says.
  static void update_chunks(const Chunk* chunks, long long num_chunks, long long* taken,
                            const char* joined, long long num_joined, const Scalars* scalars) {
    for (long long i; (i = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < num_chunks;) {
      Chunk chunk = chunks[i];
      if (i < num_joined) chunk.grad = joined + reinterpret_cast<std::intptr_t>(chunk.grad);
      update_chunk(chunk, scalars[chunk.group]);
    }
  }

  static void update_chunk(const Chunk& chunk, Scalars scalars) {
    const long long width = chunk.width, size = chunk.num_rows * width;
    if constexpr (Rule::num_row_slots > 0) {
      static_assert(is_in_place, "a rule with numbers of rows has no other arrays");
      const InPlace written(chunk.arrays);
      const Real* const grad = static_cast<const Real*>(chunk.grad);
      const long long number = chunk.first_number + chunk.first;
      update_whole_rows<1, Rule>(written.of, grad, chunk.num_rows, width, number, scalars);
    } else if constexpr (per_block > 0) {
      for (long long row = 0; row < chunk.num_rows; ++row)
        for (long long left = 0; left < width; left += per_block)
          update_part(chunk, place_of(row, left, width), width - left, scalars);
    } else {
      const long long part = chunk.grad == nullptr ? num_zeros : size;
      for (long long at = 0; at < size; at += part)
        update_part(chunk, {at, 0}, size - at < part ? size - at : part, scalars);
    }
  }

  // Updates rows[first] to rows[last - 1] of a table, each by the sum of its values: see
  // `update_rows` above.
  static void update_rows(void* const* arrays, long long width, const Real* values,
                          const long long* rows, const long long* positions,
                          const long long* begins, const long long* firsts, long long first,
                          long long last, long long first_number, Scalars scalars) {
    if constexpr (is_in_place) {
      const InPlace written(arrays);
      gpuopt::update_rows<Rule>(written.of, width, values, rows, positions, begins, firsts, first,
                                last, first_number, scalars);
    } else {
      update_stored_rows(arrays, width, values, rows, positions, begins, firsts, first, last,
                         first_number, scalars);
    }
  }

  // How many columns of a row are updated at a time: a block, where there are blocks.
  static constexpr long long most_columns = per_block > 0 ? per_block : tile_width;

  // Returns how many columns there are from `left` on.
  static long long columns_at(long long left, long long width) {
    return width - left < most_columns ? width - left : most_columns;
  }

  static Place place_of(long long row, long long left, long long width) {
    const long long blocks = (width + most_columns - 1) / most_columns;
    return {row * width + left, row * blocks + left / most_columns};
  }

  // Adds up `size` columns of a row's values, from `left` on.
  static void sum_columns(const RowValues<Real>& values, long long left, long long size,
                          Real* sums) {
    for (long long at = 0; at < size; at += tile_width) {
      const long long columns = tile_at(at, size);
      const Real* const sum = sum_values(values, left + at, columns, sums + at);
      if (sum != sums + at)
        for (long long i = 0; i < columns; ++i) sums[at + i] = sum[i];
    }
  }

  // The arrays where each of them has numbers as rules compute with them.
  struct InPlace {
    Real* of[num_arrays];

    explicit InPlace(void* const* arrays) {
      for (int k = 0; k < num_arrays; ++k) of[k] = static_cast<Real*>(arrays[k]);
    }
  };

  // Some columns of a row, decoded while they make several steps, and then stored.
  class Columns {
   public:
    Real var[most_columns];
    Real slot[slot_capacity<Rule>][most_columns];
    const long long size;

    Columns(void* const* arrays, Place at, long long columns) : size(columns), first(at.element) {
      open(arrays, at, std::index_sequence_for<Slot...>{});
    }

    // The slots of another rule that has as many, from column `left` on.
    template <class Other>
    Slots<Other, Real> slots_from(long long left) {
      static_assert(Other::num_slots == Rule::num_slots, "of the same slots");
      Slots<Other, Real> from{};
      for (int k = 0; k < Rule::num_slots; ++k) from.of[k] = slot[k] + left;
      return from;
    }

    void store(const Scalars& scalars) { store(scalars, std::index_sequence_for<Slot...>{}); }

   private:
    long long first;
    typename Var::View variable;
    std::tuple<typename Slot::View...> slots;

    template <std::size_t... k>
    void open(void* const* arrays, Place at, std::index_sequence<k...> every) {
      open_views(arrays, at, size, variable, slots, every);
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i) {
        var[i] = variable.read(i);
        ((slot[k][i] = std::get<k>(slots).read(i)), ...);
      }
    }

    template <std::size_t... k>
    void store(const Scalars& scalars, std::index_sequence<k...>) {
      const Numbered numbered = {first, 0};
      GPUOPT_INDEPENDENT
      for (long long i = 0; i < size; ++i) {
        Real value = var[i];
        Real own[slot_capacity<Rule>] = {slot[k][i]...};
        if constexpr (per_block > 0) begin_anew(own);
        if constexpr (Rule::is_rounded)
          numbered.template round<Rule, IsRounded>(static_cast<int>(i), scalars, value, own);
        variable.write(i, value);
        (std::get<k>(slots).write(i, own[k]), ...);
      }
      variable.close();
      (std::get<k>(slots).close(), ...);
    }
  };

 private:
  // A gradient of zero is read from here.
  static constexpr long long num_zeros = 512;
  alignas(Real) static constexpr unsigned char zeros[num_zeros * sizeof(Real)] = {};

  static void update_stored_rows(void* const* arrays, long long width, const Real* values,
                                 const long long* rows, const long long* positions,
                                 const long long* begins, const long long* firsts, long long first,
                                 long long last, long long first_number, const Scalars& scalars) {
    for (long long row = first; row < last; ++row) {
      const RowValues<Real> mine = {width,       values,          positions,
                                    begins[row], begins[row + 1], firsts[row]};
      for (long long left = 0; left < width; left += most_columns) {
        const long long size = columns_at(left, width);
        Real sums[most_columns];
        sum_columns(mine, left, size, sums);
        const Place at = place_of(rows[row], left, width);
        const typename Plain<Real>::View gradient = {sums};
        if (per_block > 0 && size == most_columns)
          update_elements(arrays, at, gradient, most_columns, {at.element, first_number}, scalars);
        else
          update_elements(arrays, at, gradient, size, {at.element, first_number}, scalars);
      }
    }
  }

  template <std::size_t... k>
  __attribute__((always_inline)) static inline void open_views(
      void* const* arrays, Place at, long long size, typename Var::View& variable,
      std::tuple<typename Slot::View...>& slots, std::index_sequence<k...>) {
    constexpr int counts[] = {Var::num_arrays, Slot::num_arrays...};
    void* const* of[1 + sizeof...(Slot)] = {arrays};
    for (std::size_t j = 0; j < sizeof...(Slot); ++j) of[j + 1] = of[j] + counts[j];
    variable.open(of[0], at, size);
    (std::get<k>(slots).open(of[1 + k], at, size), ...);
  }

  // Updates the next `left` elements of a chunk, or those of a block if they are more.
  static void update_part(const Chunk& chunk, Place at, long long left, const Scalars& scalars) {
    const bool is_zero = chunk.grad == nullptr;
    void* const gradients[] = {const_cast<void*>(is_zero ? zeros : chunk.grad)};
    const auto update = [&](long long size) __attribute__((always_inline)) {
      typename Gradient::View gradient;
      gradient.open(gradients, is_zero ? Place{0, 0} : at, size);
      const Numbered numbered = {chunk.first + at.element, chunk.first_number};
      update_elements(chunk.arrays, at, gradient, size, numbered, scalars);
    };
    // Where the compiler knows how long a block is, it leaves out everything for other lengths.
    if (per_block > 0 && left >= per_block)
      update(per_block);
    else
      update(left);
  }

  // Updates elements: of one block, or, of arrays without blocks, any number of them.
  template <class Gradients>
  __attribute__((always_inline)) static inline void update_elements(void* const* arrays, Place at,
                                                                    const Gradients& gradient,
                                                                    long long size,
                                                                    const Numbered& numbered,
                                                                    const Scalars& scalars) {
    update_elements(arrays, at, gradient, size, numbered, scalars,
                    std::index_sequence_for<Slot...>{});
  }

  template <class Gradients, std::size_t... k>
  __attribute__((always_inline)) static inline void update_elements(
      void* const* arrays, Place at, const Gradients& gradient, long long size, Numbered numbered,
      const Scalars& scalars, std::index_sequence<k...> every) {
    typename Var::View variable;
    std::tuple<typename Slot::View...> slots;
    open_views(arrays, at, size, variable, slots, every);
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < size; ++i) {
      Real value = variable.read(i);
      Real slot[slot_capacity<Rule>] = {std::get<k>(slots).read(i)...};
      const Real grad = Rule::gradient(gradient.read(i), numbered.number(i), slot, scalars);
      Rule::apply(value, grad, slot, scalars);
      if constexpr (per_block > 0) begin_anew(slot);
      if constexpr (Rule::is_rounded && !is_in_place)
        numbered.template round<Rule, IsRounded>(static_cast<int>(i), scalars, value, slot);
      Rule::follow(Var::of(value), slot, scalars);
      if (writes_var<Rule>) variable.write(i, value);
      // A slot that the rule only reads may begin anew, too.
      ((writes_slot<Rule>(k) || Slot::per_block > 0 ? std::get<k>(slots).write(i, slot[k])
                                                    : void()),
       ...);
    }
    variable.close();
    (std::get<k>(slots).close(), ...);
  }

  // For `Numbered::round`: an average is not counted.
  struct IsRounded {
    static constexpr bool of(int k) {
      constexpr bool every[] = {Var::is_rounded, Slot::is_rounded...};
      return every[k == 0 ? 0 : Rule::num_averages + k];
    }
  };

  // The coded slots of an element begin anew where one has no code.
  static inline void begin_anew(Real* slot) {
    constexpr bool is_coded[] = {Slot::per_block > 0 ...};
    bool all_finite = true;
    for (int k = 0; k < Rule::num_slots; ++k)
      if (is_coded[k]) all_finite &= is_finite(slot[k]);
    for (int k = 0; k < Rule::num_slots; ++k)
      if (is_coded[k]) slot[k] = all_finite ? slot[k] : 0;
  }
};

}  // namespace gpuopt
