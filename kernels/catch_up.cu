// Rows of tables that missed steps: they make these when a gradient names them, or when they are
// read.
#include "shared/late_rows.cuh"
#include "shared/touched_rows.cuh"

namespace gpuopt {

// How many blocks of `late_update` a multiprocessor is to hold: compilers take a few registers more
// for doubles. 0 leaves it to them.
template <class Program>
constexpr int blocks_of_late_updates = sizeof(RealOf<Program>) > 4 ? 4 : 0;

// Updates the rows of tables that have a gradient, after the steps that they have missed; see
// `sparse_update`.
template <class Program>
__global__ void __launch_bounds__(row_threads, blocks_of_late_updates<Program>)
    late_update(const __grid_constant__ TableGradient only_gradient,
                const TableGradient* __restrict__ gradients, long long num_tables,
                const __grid_constant__ ArraysOf<Program> only_arrays,
                const long long* __restrict__ arrays, const SortedRows<KeyOf<Program>> rows,
                const RealOf<Program>* __restrict__ parts, long long row_width,
                const __grid_constant__ GivenOf<Program> scalars,
                const ScalarsOf<Program>* __restrict__ many_scalars,
                const __grid_constant__ LateTable only_late,
                const LateTable* __restrict__ late_tables, unsigned int* num_done,
                int lanes_per_row, const unsigned long long* __restrict__ refused) {
  const GroupScalars<Program> every = {scalars, many_scalars};
  const LateTables<Program> behind = {only_late, late_tables};
  update_rows<Program>(Tables{only_gradient, gradients, num_tables}, only_arrays, arrays, rows,
                       parts, row_width, every, behind, nullptr, lanes_per_row, refused);
  count_steps<Program>(behind, every, num_tables, num_done, refused);
}

template <class Program, int count>
__device__ __forceinline__ void bring_up_row(const Target<Program>& target,
                                             const LateRow<Program>& late, long long row_width,
                                             const ScalarsOf<Program>& scalars,
                                             const Lanes& lanes) {
  for (long long column = lanes.lane * count; column < row_width;
       column += lanes.num_lanes * count) {
    const long long at = late.row * row_width + column;
    State<Program, count> state(target, at);
    late.bring_up(state, scalars);
    state.store_to(target, at);
  }
}

// Has rows make the steps that they have missed; they may repeat, and those that the table does not
// have are left out. If `rows` is null, they are all rows of the table, `num_rows`.
template <class Program>
__global__ void bring_up_rows(const __grid_constant__ ArraysOf<Program> arrays,
                              const typename Program::Index* __restrict__ rows, long long num_rows,
                              long long height, long long row_width,
                              const __grid_constant__ LateTable late, int lanes_per_row) {
  const ScalarsOf<Program> scalars = key_of_last_step<Program>(late);
  const Target<Program> target(arrays.of);
  const Lanes lanes(lanes_per_row);
  const int now = steps_of(late);
  const bool has_packs = row_width % pack_of<Program> == 0 && target.is_pack_aligned();
  for (long long i = lanes.group; i < num_rows; i += lanes.num_groups) {
    const long long row = rows == nullptr ? i : static_cast<long long>(__ldg(rows + i));
    if (row < 0 || row >= height) continue;
    const LateRow<Program> found = {late, row, take_late_row(late, row, now, lanes), now};
    if (found.last >= now) continue;
    if (has_packs) {
      bring_up_row<Program, pack_of<Program>>(target, found, row_width, scalars, lanes);
    } else {
      bring_up_row<Program, 1>(target, found, row_width, scalars, lanes);
    }
  }
}

}  // namespace gpuopt
