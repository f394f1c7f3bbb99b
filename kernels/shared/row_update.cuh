// An update of one row by a row-wise rule, by the lanes that share the row.
#pragma once
#include "lanes.cuh"
#include "row_wise.cuh"
#include "rule.cuh"
#include "update.cuh"

namespace gpuopt {

// A row-wise program within one row; see `OfRow`.
template <class Program>
using RowOf = WithTypesOf<OfRow<Program>, Program>;

// Adds up a number of each lane, always in the same order; returns the sum to all of them.
template <class Real>
__device__ __forceinline__ Real sum_of_lanes(Real mine, const Lanes& lanes) {
  for (int distance = lanes.num_lanes / 2; distance > 0; distance /= 2) {
    mine += __shfl_xor_sync(mask_of(lanes), mine, distance);
  }
  return mine;
}

template <class Program, int count, class GradientAt>
__device__ __forceinline__ void update_row_by(const Target<RowOf<Program>>& elements, long long row,
                                              long long row_width, const Lanes& lanes,
                                              const GradientAt& gradient_at,
                                              ScalarsOf<RowOf<Program>>& scalars) {
  using Real = RealOf<Program>;
  const long long step = lanes.num_lanes * count;
  Real squares = 0;
  for (long long column = lanes.lane * count; column < row_width; column += step) {
    const long long at = row * row_width + column;
    Real gradient[count];
    gradient_at(column, gradient);
    const auto add = [&](int k, Real* slot) {
      const Real seen = Program::gradient(gradient[k], elements.number(at + k), slot, scalars);
      squares += seen * seen;
    };
    if constexpr (Program::has_gradient_slots) {
      State<RowOf<Program>, count> state(elements, at);
      state.change([&](int k, Real&, Real* slot) { add(k, slot); });  // not stored
    } else {
#pragma unroll
      for (int k = 0; k < count; ++k) add(k, nullptr);
    }
  }
  scalars.mean_square = sum_of_lanes(squares, lanes) / static_cast<Real>(row_width);
#pragma unroll 1  // the state of several packs would take too many registers
  for (long long column = lanes.lane * count; column < row_width; column += step) {
    const long long at = row * row_width + column;
    State<RowOf<Program>, count> state(elements, at);
    Real gradient[count];
    gradient_at(column, gradient);
    state.update(gradient, scalars);
    state.store_to(elements, at);
  }
}

// Updates one row. `gradient_at(column, gradient)` writes the gradient of one element, or of a pack
// if `is_grad_packed`, from a column on; it is called twice for each. Only the first lane reads and
// writes the row's own numbers.
template <class Program, class GradientAt>
__device__ __forceinline__ void update_whole_row(const Target<Program>& target, long long row,
                                                 long long row_width, const Lanes& lanes,
                                                 bool is_grad_packed, const GradientAt& gradient_at,
                                                 const ScalarsOf<Program>& scalars) {
  using Real = RealOf<Program>;
  constexpr int pack = pack_of<Program>;
  constexpr int first = RowOf<Program>::num_slots;
  ScalarsOf<RowOf<Program>> of_row;
  static_cast<ScalarsOf<Program>&>(of_row) = scalars;
#pragma unroll
  for (int k = 0; k < Program::num_row_slots; ++k) {
    Elements<SlotOf<Program>, 1> mine = {};
    if (lanes.lane == 0) load<Caching::evict_first>(target.slots.of[first + k] + row, mine);
    of_row.row_slot[k] = __shfl_sync(mask_of(lanes), Real(mine.of[0]), 0, lanes.num_lanes);
  }
  const Target<RowOf<Program>> elements(target);
  if (is_grad_packed && row_width % pack == 0 && elements.is_pack_aligned()) {
    update_row_by<Program, pack>(elements, row, row_width, lanes, gradient_at, of_row);
  } else {
    update_row_by<Program, 1>(elements, row, row_width, lanes, gradient_at, of_row);
  }
  if (lanes.lane != 0) return;
  RowOf<Program>::update_row_slots(of_row);
#pragma unroll
  for (int k = 0; k < Program::num_row_slots; ++k) {
    const Elements<SlotOf<Program>, 1> mine = {SlotOf<Program>(of_row.row_slot[k])};
    store<Caching::evict_first>(target.slots.of[first + k] + row, mine);
  }
}

}  // namespace gpuopt
