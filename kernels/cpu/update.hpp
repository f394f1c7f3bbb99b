// Dense and sparse updates in host memory: the loops around a rule where the compiler is the
// machine's own. Threads call them for different chunks or rows.
// Precondition: the variable, its slots and the gradient share no memory.
#pragma once
#include <cstdint>

#include "../shared/element.cuh"
#include "../shared/row_order.cuh"
#include "../shared/row_wise.cuh"
#include "../shared/rule.cuh"

// Each iteration has an element of its own, so that several may run in one instruction.
#if defined(__clang__)
#define GPUOPT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GPUOPT_INDEPENDENT _Pragma("GCC ivdep")
#endif

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

// Of a variable that is stored as it is computed.
struct AsComputed {
  template <class Real>
  static Real of(Real value) {
    return value;
  }
};

// Updates an element; `Kept::of` returns what of the variable is stored then. Where that is rounded
// at random, an average does not follow yet.
// `inline`: else GCC calls it for each element of longer rules, and uses no vectors.
template <class Rule, class Kept = AsComputed, class Real>
inline void update_element(Real* var, const Slots<Rule, Real>& slots, long long at, Real grad,
                           const typename Rule::template Scalars<Real>& scalars) {
  Real value = var[at];
  Real slot[slot_capacity<Rule>];
  for (int k = 0; k < Rule::num_slots; ++k) slot[k] = slots.of[k][at];
  Rule::apply(value, grad, slot, scalars);
  if constexpr (!Rule::is_rounded) Rule::follow(Kept::of(value), slot, scalars);
  var[at] = value;
  for (int k = 0; k < Rule::num_slots; ++k) slots.of[k][at] = slot[k];
}

// Returns the square of the gradient that a rule computes with.
template <class Rule, class Real>
inline Real squared(Real grad, const typename Rule::template Scalars<Real>& scalars) {
  const Real seen = Rule::gradient(grad, scalars);
  return seen * seen;
}

// Adds up the squares of a row. `gradient_at(left, tile)` returns where `tile` columns from `left`
// on are.
template <class Rule, class Real, class GradientAt>
__attribute__((always_inline)) inline Real sum_of_squares(
    long long width, const GradientAt& gradient_at,
    const typename Rule::template Scalars<Real>& scalars) {
  // Several sums, in one order, so that several additions may run in one instruction.
  constexpr int lanes = 16;
  if (width <= lanes) {  // the same order, as each lane has one square
    const Real* const gradient = gradient_at(0, width);
    Real sum = squared<Rule>(gradient[0], scalars);
    for (long long i = 1; i < width; ++i) sum += squared<Rule>(gradient[i], scalars);
    return sum;
  }
  Real squares[lanes] = {};
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = tile_at(left, width);
    const Real* const gradient = gradient_at(left, tile);
    long long i = 0;
    for (; i + lanes <= tile; i += lanes)
      for (int lane = 0; lane < lanes; ++lane)
        squares[lane] += squared<Rule>(gradient[i + lane], scalars);
    for (; i < tile; ++i) squares[i % lanes] += squared<Rule>(gradient[i], scalars);
  }
  for (int lane = 1; lane < lanes; ++lane) squares[0] += squares[lane];
  return squares[0];
}

// Updates one row by a row-wise rule. See `sum_of_squares` for `gradient_at`.
template <class Rule, class Real, class GradientAt>
__attribute__((always_inline)) inline void update_whole_row(
    Real* const* written, long long row, long long width, const GradientAt& gradient_at,
    const typename Rule::template Scalars<Real>& scalars) {
  constexpr int first = OfRow<Rule>::num_slots;
  typename OfRow<Rule>::template Scalars<Real> of_row;
  static_cast<typename Rule::template Scalars<Real>&>(of_row) = scalars;
  of_row.mean_square =
      sum_of_squares<Rule, Real>(width, gradient_at, scalars) / static_cast<Real>(width);
  for (int k = 0; k < Rule::num_row_slots; ++k) of_row.row_slot[k] = written[1 + first + k][row];
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = tile_at(left, width);
    const Real* const gradient = gradient_at(left, tile);
    const long long offset = row * width + left;
    Real* const var = written[0] + offset;
    const Slots<OfRow<Rule>, Real> slots = slots_at<OfRow<Rule>>(written, offset);
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i)
      update_element<OfRow<Rule>>(var, slots, i, gradient[i], of_row);
  }
  OfRow<Rule>::update_row_slots(of_row);
  for (int k = 0; k < Rule::num_row_slots; ++k) written[1 + first + k][row] = of_row.row_slot[k];
}

// Rows of a variable, its slots and its gradient that follow each other, and the scalars of the
// variable's group. A gradient at nullptr is zero. Where a rule is not row-wise, each element is a
// row.
template <class Rule, class Real>
struct Chunk {
  Real* written[1 + Rule::num_slots];
  const Real* grad;
  std::intptr_t num_rows;
  std::intptr_t width;
  const typename Rule::template Scalars<Real>* scalars;
};

// Updates narrow rows by a row-wise rule. The compiler knows how wide they are, and computes
// several rows in one instruction. A row's squares are added up in the order of `sum_of_squares`.
template <int width, class Rule, class Real>
void update_narrow_rows(const Chunk<Rule, Real>& chunk,
                        const typename Rule::template Scalars<Real>& scalars) {
  constexpr int first = OfRow<Rule>::num_slots;
  Real* const var = chunk.written[0];
  const Slots<OfRow<Rule>, Real> slots = slots_at<OfRow<Rule>>(chunk.written, 0);
  Real* row_slots[Rule::num_row_slots];
  for (int k = 0; k < Rule::num_row_slots; ++k) row_slots[k] = chunk.written[1 + first + k];
  const Real* const grad = chunk.grad;
  typename OfRow<Rule>::template Scalars<Real> of_chunk;
  static_cast<typename Rule::template Scalars<Real>&>(of_chunk) = scalars;
  GPUOPT_INDEPENDENT
  for (long long row = 0; row < chunk.num_rows; ++row) {
    const long long at = row * width;
    Real squares = squared<Rule>(grad[at], scalars);
    for (int i = 1; i < width; ++i) squares += squared<Rule>(grad[at + i], scalars);
    auto of_row = of_chunk;
    of_row.mean_square = squares / Real(width);
    for (int k = 0; k < Rule::num_row_slots; ++k) of_row.row_slot[k] = row_slots[k][row];
    for (int i = 0; i < width; ++i)
      update_element<OfRow<Rule>>(var, slots, at + i, grad[at + i], of_row);
    OfRow<Rule>::update_row_slots(of_row);
    for (int k = 0; k < Rule::num_row_slots; ++k) row_slots[k][row] = of_row.row_slot[k];
  }
}

// Updates whole rows by a row-wise rule; they are no narrower than `narrow`.
template <int narrow = 1, class Rule, class Real>
void update_chunk_of_rows(const Chunk<Rule, Real>& chunk,
                          const typename Rule::template Scalars<Real>& scalars) {
  if constexpr (narrow <= most_narrow_columns) {
    if (chunk.width == narrow)
      update_narrow_rows<narrow>(chunk, scalars);
    else
      update_chunk_of_rows<narrow + 1>(chunk, scalars);
  } else {
    const Real* const grad = chunk.grad;
    const long long width = chunk.width;
    for (long long row = 0; row < chunk.num_rows; ++row) {
      const auto gradient_at = [=](long long left, long long) { return grad + row * width + left; };
      update_whole_row<Rule>(chunk.written, row, width, gradient_at, scalars);
    }
  }
}

template <class Rule, class Real>
void update_chunk(const Chunk<Rule, Real>& chunk, typename Rule::template Scalars<Real> scalars) {
  Real* const var = chunk.written[0];
  const Slots<Rule, Real> slots = slots_at<Rule>(chunk.written, 0);
  const Real* const grad = chunk.grad;
  if constexpr (Rule::num_row_slots > 0) {
    update_chunk_of_rows(chunk, scalars);
  } else if (grad != nullptr) {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < chunk.num_rows; ++i)
      update_element<Rule>(var, slots, i, grad[i], scalars);
  } else {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < chunk.num_rows; ++i)
      update_element<Rule>(var, slots, i, Real(0), scalars);
  }
}

// Updates chunks until all are taken. Threads that call it at once share them; `taken` counts for
// all of them, from 0.
template <class Rule, class Real>
void update_chunks(const Chunk<Rule, Real>* chunks, long long num_chunks, long long* taken) {
  for (long long i; (i = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < num_chunks;)
    update_chunk(chunks[i], *chunks[i].scalars);
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

// Adds up the values from sorted position `first` to before `end`, of one stretch, by its pieces.
template <class Real>
__attribute__((always_inline)) inline void sum_stretch(const RowValues<Real>& row, long long first,
                                                       long long end, long long left,
                                                       long long tile, Real* sum) {
  const long long apart = row.begin - row.first;
  long long next = end_of_part(first, end, piece_size);
  sum_one_by_one(row, first + apart, next + apart, left, tile, sum);
  while (next < end) {
    Real piece[tile_width];
    const long long begin = next;
    next = end_of_part(begin, end, piece_size);
    sum_one_by_one(row, begin + apart, next + apart, left, tile, piece);
    for (long long i = 0; i < tile; ++i) sum[i] += piece[i];
  }
}

// Adds up the values of a row that has several pieces; `known_tile` is `tile` where the compiler is
// to know it, and else 0.
template <long long known_tile, class Real>
__attribute__((noinline)) void sum_pieces(const RowValues<Real>& row, long long left,
                                          long long tile, Real* sum) {
  if (known_tile > 0) tile = known_tile;
  const long long end = row.first + (row.end - row.begin);
  long long next = end_of_part(row.first, end, stretch_size);
  Real total[tile_width];  // no other memory, as the compiler knows
  sum_stretch(row, row.first, next, left, tile, total);
  while (next < end) {
    Real stretch[tile_width];
    const long long begin = next;
    next = end_of_part(begin, end, stretch_size);
    sum_stretch(row, begin, next, left, tile, stretch);
    for (long long i = 0; i < tile; ++i) total[i] += stretch[i];
  }
  for (long long i = 0; i < tile; ++i) sum[i] = total[i];
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

// Does what `sum_piece` does for any row, in the order of row_order.cuh.
template <class Real>
__attribute__((always_inline)) inline const Real* sum_values(const RowValues<Real>& row,
                                                             long long left, long long tile,
                                                             Real* sum) {
  if (is_one_piece(row)) return sum_piece(row, left, tile, sum);
  if (tile == tile_width)
    sum_pieces<tile_width>(row, left, tile, sum);
  else
    sum_pieces<0>(row, left, tile, sum);
  return sum;
}

// Updates some columns of one row that has several pieces; see `update_tile`.
template <class Rule, class Real, class Row>
__attribute__((noinline)) void update_by_pieces(
    const Row& row, Real* var, const Slots<Rule, Real>& slots, const RowValues<Real>& values,
    long long left, long long tile, const typename Rule::template Scalars<Real>& scalars) {
  Real sum[tile_width];
  const Real* const grad = sum_values(values, left, tile, sum);
  row.template update<Rule>(var, slots, grad, tile, scalars);
}

// Updates some columns of one row, from `left` on, by the sum of its values. The variable and the
// slots begin at the first of these columns; see `update_rows` for the row. Inlined: where the
// compiler knows `tile`, it leaves out everything for other widths. Rows of several pieces are
// apart: if their sum were `sum`, the compiler would keep no other sum in registers.
template <class Rule, class Real, class Row>
__attribute__((always_inline)) inline void update_tile(
    const Row& row, Real* var, const Slots<Rule, Real>& slots, const RowValues<Real>& values,
    long long left, long long tile, const typename Rule::template Scalars<Real>& scalars) {
  if (!is_one_piece(values))
    return update_by_pieces<Rule, Real>(row, var, slots, values, left, tile, scalars);
  Real sum[tile_width];
  const Real* const grad = sum_piece(values, left, tile, sum);
  row.template update<Rule>(var, slots, grad, tile, scalars);
}

// Updates rows[first] to rows[last - 1]. Row k receives the sum of the values at
// positions[begins[k]] to positions[begins[k + 1] - 1]; firsts[k] is the first one's sorted
// position of the call. `table.prefetch` is called some rows ahead, and `table.at` returns a row
// that is about to be updated: its `update` is called with each tile, and its `end` after the last.
template <class Rule, class Real, class Table>
void update_rows(Real* const* written, long long width, const Real* values, const long long* rows,
                 const long long* positions, const long long* begins, const long long* firsts,
                 long long first, long long last, typename Rule::template Scalars<Real> scalars,
                 const Table& table) {
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
      update_whole_row<Rule>(written, rows[row], width, gradient_at, scalars);
      continue;
    }
    const auto found = table.at(rows[row]);
    for (long long left = 0; left < width; left += tile_width) {
      const long long offset = rows[row] * width + left;
      Real* const var = written[0] + offset;
      const Slots<Rule, Real> slots = slots_at<Rule>(written, offset);
      const auto update = [&](long long tile) __attribute__((always_inline)) {
        update_tile<Rule>(found, var, slots, mine, left, tile, scalars);
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
      Real* var, const Slots<Rule, Real>& slots, const Real* grad, long long tile,
      const typename Rule::template Scalars<Real>& scalars) const {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i) update_element<Rule>(var, slots, i, grad[i], scalars);
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
                 long long first, long long last,
                 const typename Rule::template Scalars<Real>& scalars) {
  update_rows<Rule>(written, width, values, rows, positions, begins, firsts, first, last, scalars,
                    TableUpToDate{});
}

}  // namespace gpuopt
