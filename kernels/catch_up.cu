// Rows of tables that missed steps: they make these when a gradient names them, or when they are
// read.
#include "shared/last_block.cuh"
#include "shared/late_rows.cuh"
#include "shared/touched_rows.cuh"

namespace gpuopt {

// Updates the rows of tables that have a gradient, after the steps that they have missed. The last
// block counts the step, which other rows will make later: rows and the count are written by one
// launch, so nothing comes between. `step_scalar` is the place of the step size among the rule's
// scalars; negative if rows without a gradient do not move.
template <class Rule, class Storage, int step_scalar, class Key, class ScalarsOf, class Behind>
__device__ __forceinline__ void update_and_count(
    const Tables& tables, const ArraysOf<Rule, Storage>& only_arrays,
    const long long* __restrict__ arrays, const SortedRows<Key>& rows,
    const Compute<Storage>* __restrict__ parts, long long row_width, const ScalarsOf& scalars_of,
    const Behind& behind, unsigned int* num_done, int lanes_per_row,
    const unsigned long long* __restrict__ refused) {
  using Real = Compute<Storage>;
  update_rows<Rule, Storage>(tables, only_arrays, arrays, rows, parts, row_width, scalars_of,
                             behind, nullptr, lanes_per_row, refused);
  __syncthreads();  // all have read the counts
  if (!is_last_block(gridDim.x, num_done) || *refused) return;
  for (long long table = 0; table < tables.count; ++table) {
    const Real step_size = step_scalar < 0 ? Real(0) : scalars_of.number(table, step_scalar);
    count_step(behind.table(table), step_size);
  }
}

// Updates one table.
template <class Rule, class Unnamed, class Shift, int step_scalar, class Storage, class Key>
__global__ void late_update(const __grid_constant__ TableGradient only_gradient,
                            const TableGradient* __restrict__ gradients, long long num_tables,
                            const __grid_constant__ ArraysOf<Rule, Storage> only_arrays,
                            const long long* __restrict__ arrays, const SortedRows<Key> rows,
                            const Compute<Storage>* __restrict__ parts, long long row_width,
                            const __grid_constant__ Scalars<Rule, Storage> scalars,
                            const __grid_constant__ LateTable only_late, unsigned int* num_done,
                            int lanes_per_row, const unsigned long long* __restrict__ refused) {
  update_and_count<Rule, Storage, step_scalar>(
      Tables{only_gradient, gradients, num_tables}, only_arrays, arrays, rows, parts, row_width,
      ScalarsOfOne<Rule, Storage>{scalars}, OneLateTable<Unnamed, Shift>{only_late}, num_done,
      lanes_per_row, refused);
}

// Updates several tables, or those of several groups.
template <class Rule, class Unnamed, class Shift, int step_scalar, class Storage, class Key>
__global__ void late_update_of_groups(
    const __grid_constant__ TableGradient only_gradient,
    const TableGradient* __restrict__ gradients, long long num_tables,
    const __grid_constant__ ArraysOf<Rule, Storage> only_arrays,
    const long long* __restrict__ arrays, const SortedRows<Key> rows,
    const Compute<Storage>* __restrict__ parts, long long row_width,
    const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
    const Scalars<Rule, Storage>* __restrict__ many_scalars,
    const LateTable* __restrict__ late_tables, unsigned int* num_done, int lanes_per_row,
    const unsigned long long* __restrict__ refused) {
  update_and_count<Rule, Storage, step_scalar>(
      Tables{only_gradient, gradients, num_tables}, only_arrays, arrays, rows, parts, row_width,
      ScalarsOfGroups<Rule, Storage>{few_scalars, many_scalars},
      LateTables<Unnamed, Shift>{late_tables}, num_done, lanes_per_row, refused);
}

template <class Unnamed, class Storage, int count>
__device__ __forceinline__ void bring_up_row(const Target<typename Unnamed::Rule, Storage>& target,
                                             const LateRow<Unnamed>& late, long long row_width,
                                             const Lanes& lanes) {
  for (long long column = lanes.lane * count; column < row_width;
       column += lanes.num_lanes * count) {
    const long long at = late.row * row_width + column;
    State<typename Unnamed::Rule, Storage, count> state(target, at);
    late.bring_up(state);
    state.store_to(target, at);
  }
}

// Has rows make the steps that they have missed; they may repeat, and those that the table does not
// have are left out. If `rows` is null, they are all rows of the table, `num_rows`.
template <class Unnamed, class Storage, class Index>
__global__ void bring_up_rows(
    const __grid_constant__ ArraysOf<typename Unnamed::Rule, Storage> arrays,
    const Index* __restrict__ rows, long long num_rows, long long height, long long row_width,
    const __grid_constant__ LateTable late, int lanes_per_row) {
  const Target<typename Unnamed::Rule, Storage> target(arrays.of);
  const Lanes lanes(lanes_per_row);
  const int now = steps_of(late);
  const bool has_packs = row_width % pack_size<Storage> == 0 && target.is_pack_aligned();
  for (long long i = lanes.group; i < num_rows; i += lanes.num_groups) {
    const long long row = rows == nullptr ? i : static_cast<long long>(__ldg(rows + i));
    if (row < 0 || row >= height) continue;
    // Of those that name a row, the first one moves it: they would all do the same.
    int last = now;
    if (lanes.lane == 0) last = atomicMax(last_of(late, row), now);
    last = __shfl_sync(mask_of(lanes), last, 0, lanes.num_lanes);
    const LateRow<Unnamed> found = {late, row, last, now};
    if (last >= now) continue;
    if (has_packs) {
      bring_up_row<Unnamed, Storage, pack_size<Storage>>(target, found, row_width, lanes);
    } else {
      bring_up_row<Unnamed, Storage, 1>(target, found, row_width, lanes);
    }
  }
}

}  // namespace gpuopt
