// Dense and sparse updates in host memory: the loops around a rule where the compiler is the
// machine's own. Threads call them for different chunks or rows.
// Precondition: the variable, its slots and the gradient share no memory.
#pragma once
#include <cstdint>

#include "../shared/element.cuh"
#include "../shared/row_wise.cuh"

// Each iteration has an element of its own, so that several may run in one instruction.
#if defined(__clang__)
#define GPUOPT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GPUOPT_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace gpuopt {

// Columns that are summed at a time: the sums stay in registers or the first-level cache.
constexpr long long tile_width = 64;

// Rows lie anywhere in a table, so each is prefetched this many rows before it is used: into the
// second-level cache, which has room for as many.
constexpr long long rows_ahead = 32;

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

// `inline`: else GCC calls it for each element of longer rules, and uses no vectors.
template <class Rule, class Real>
inline void update_element(Real* var, const Slots<Rule, Real>& slots, long long at, Real grad,
                           const typename Rule::template Scalars<Real>& scalars) {
  Real value = var[at];
  Real slot[slot_capacity<Rule>];
  for (int k = 0; k < Rule::num_slots; ++k) slot[k] = slots.of[k][at];
  Rule::apply(value, grad, slot, scalars);
  var[at] = value;
  for (int k = 0; k < Rule::num_slots; ++k) slots.of[k][at] = slot[k];
}

// Equally long parts of a variable, its slots and its gradient, and the scalars of the variable's
// group. A gradient at nullptr is zero.
template <class Rule, class Real>
struct Chunk {
  Real* written[1 + Rule::num_slots];
  const Real* grad;
  std::intptr_t size;
  const typename Rule::template Scalars<Real>* scalars;
};

template <class Rule, class Real>
void update_chunk(const Chunk<Rule, Real>& chunk, typename Rule::template Scalars<Real> scalars) {
  Real* const var = chunk.written[0];
  const Slots<Rule, Real> slots = slots_at<Rule>(chunk.written, 0);
  const Real* const grad = chunk.grad;
  if (grad != nullptr) {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < chunk.size; ++i)
      update_element<Rule>(var, slots, i, grad[i], scalars);
  } else {
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < chunk.size; ++i)
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

// Adds up some columns of the values at positions[begin] to positions[end - 1]. `values` begin at
// the first of these columns.
template <class Real>
__attribute__((always_inline)) inline void sum_values(long long width, const Real* values,
                                                      const long long* positions, long long begin,
                                                      long long end, long long tile, Real* sum) {
  const Real* value = values + positions[begin] * width;
  for (long long i = 0; i < tile; ++i) sum[i] = value[i];
  for (long long at = begin + 1; at < end; ++at) {
    value = values + positions[at] * width;
    for (long long i = 0; i < tile; ++i) sum[i] += value[i];
  }
}

// Updates some columns of one row by the sum of its values at positions[begin] to
// positions[end - 1]. `values`, the variable and the slots begin at the first of these columns.
// Inlined: where the compiler knows `tile`, it leaves out everything for other widths.
template <class Rule, class Real>
__attribute__((always_inline)) inline void update_tile(
    Real* var, const Slots<Rule, Real>& slots, long long width, const Real* values,
    const long long* positions, long long begin, long long end, long long tile,
    const typename Rule::template Scalars<Real>& scalars) {
  Real sum[tile_width];
  sum_values(width, values, positions, begin, end, tile, sum);
  GPUOPT_INDEPENDENT
  for (long long i = 0; i < tile; ++i) update_element<Rule>(var, slots, i, sum[i], scalars);
}

// Updates one row by a row-wise rule, and the sum of its values.
template <class Rule, class Real>
void update_whole_row(Real* const* written, long long row, long long width, const Real* values,
                      const long long* positions, long long begin, long long end,
                      const typename Rule::template Scalars<Real>& scalars) {
  constexpr int first = OfRow<Rule>::num_slots;
  constexpr int lanes = 16;
  const auto tile_at = [width](long long left) {
    return width - left < tile_width ? width - left : tile_width;
  };
  Real sum[tile_width];
  // Several sums, in one order, so that several additions may run in one instruction.
  Real squares[lanes] = {};
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = tile_at(left);
    sum_values(width, values + left, positions, begin, end, tile, sum);
    long long i = 0;
    for (; i + lanes <= tile; i += lanes)
      for (int lane = 0; lane < lanes; ++lane) squares[lane] += sum[i + lane] * sum[i + lane];
    for (; i < tile; ++i) squares[i % lanes] += sum[i] * sum[i];
  }
  for (int lane = 1; lane < lanes; ++lane) squares[0] += squares[lane];
  typename OfRow<Rule>::template Scalars<Real> of_row;
  static_cast<typename Rule::template Scalars<Real>&>(of_row) = scalars;
  of_row.mean_square = squares[0] / static_cast<Real>(width);
  for (int k = 0; k < Rule::num_row_slots; ++k) of_row.row_slot[k] = written[1 + first + k][row];
  for (long long left = 0; left < width; left += tile_width) {
    const long long tile = tile_at(left);
    if (width > tile_width) sum_values(width, values + left, positions, begin, end, tile, sum);
    const long long offset = row * width + left;
    Real* const var = written[0] + offset;
    const Slots<OfRow<Rule>, Real> slots = slots_at<OfRow<Rule>>(written, offset);
    GPUOPT_INDEPENDENT
    for (long long i = 0; i < tile; ++i) update_element<OfRow<Rule>>(var, slots, i, sum[i], of_row);
  }
  OfRow<Rule>::update_row_slots(of_row);
  for (int k = 0; k < Rule::num_row_slots; ++k) written[1 + first + k][row] = of_row.row_slot[k];
}

// Updates rows[first] to rows[last - 1]. Row k receives the values at positions[begins[k]] to
// positions[begins[k + 1] - 1], added up in this order.
template <class Rule, class Real>
void update_rows(Real* const* written, long long width, const Real* values, const long long* rows,
                 const long long* positions, const long long* begins, long long first,
                 long long last, typename Rule::template Scalars<Real> scalars) {
  for (long long row = first; row < last; ++row) {
    if (row + rows_ahead < last) {
      const long long next = row + rows_ahead;
      prefetch(values + positions[begins[next]] * width, width);
      for (int k = 0; k <= Rule::num_slots - num_row_slots<Rule>; ++k)
        prefetch(written[k] + rows[next] * width, width);
    }
    const long long begin = begins[row], end = begins[row + 1];
    if constexpr (num_row_slots<Rule> > 0) {
      update_whole_row<Rule>(written, rows[row], width, values, positions, begin, end, scalars);
      continue;
    }
    for (long long left = 0; left < width; left += tile_width) {
      const long long offset = rows[row] * width + left;
      Real* const var = written[0] + offset;
      const Slots<Rule, Real> slots = slots_at<Rule>(written, offset);
      const auto update = [&](long long tile) __attribute__((always_inline)) {
        update_tile<Rule>(var, slots, width, values + left, positions, begin, end, tile, scalars);
      };
      if (left + tile_width <= width)
        update(tile_width);
      else
        update(width - left);
    }
  }
}

}  // namespace gpuopt
