// Rows of tables that missed steps and whose slots are in 8 bits; see catch_up.cu. The same lanes
// bring up all blocks of a row, whose steps are counted once.
#include "shared/coded_rows.cuh"
#include "shared/late_rows.cuh"

namespace gpuopt {

// Updates tables; see `late_update` for the arguments.
template <class Program>
__global__ void update_late_coded_rows(
    const __grid_constant__ TableGradient only_gradient,
    const TableGradient* __restrict__ gradients, long long num_tables,
    const __grid_constant__ CodedArraysOf<Program> only_arrays,
    const long long* __restrict__ arrays, const SortedRows<KeyOf<Program>> rows,
    const float* __restrict__ parts, long long row_width,
    const __grid_constant__ GivenOf<Program> scalars,
    const ScalarsOf<Program>* __restrict__ many_scalars,
    const __grid_constant__ LateTable only_late, const LateTable* __restrict__ late_tables,
    unsigned int* num_done, const unsigned long long* __restrict__ refused) {
  if (*refused != 0) return;
  const GroupScalars<Program> every = {scalars, many_scalars};
  const LateTables<Program> behind = {only_late, late_tables};
  prepare_codes<Program>();
  update_rows_of_codes<Program>(Tables{only_gradient, gradients, num_tables}, only_arrays, arrays,
                                rows, parts, row_width, every, behind, nullptr);
  count_steps<Program>(behind, every, num_tables, num_done, refused);
}

// Has rows make the steps that they have missed; see `bring_up_rows` for the arguments.
template <class Program>
__global__ void bring_up_coded_rows(const __grid_constant__ CodedArraysOf<Program> arrays,
                                    const typename Program::Index* __restrict__ rows,
                                    long long num_rows, long long height, long long row_width,
                                    const __grid_constant__ LateTable late) {
  const ScalarsOf<Program> scalars = key_of_last_step<Program>(late);
  prepare_codes<Program>();
  const CodedTarget<Program> target(arrays.of);
  const bool has_packs = target.has_packs();
  const Lanes lanes(lanes_of_block<Program>(row_width));
  const long long per_row = blocks_of_row<Program>(row_width);
  const int now = steps_of(late);
  for (long long i = lanes.group; i < num_rows; i += lanes.num_groups) {
    const long long row = rows == nullptr ? i : static_cast<long long>(__ldg(rows + i));
    if (row < 0 || row >= height) continue;
    const LateRow<Program> found = {late, row, take_late_row(late, row, now, lanes), now};
    if (found.last >= now) continue;
    for (long long number = 0; number < per_row; ++number) {
      const LanePart part(Program::per_block, row * per_row + number, row * row_width,
                          number * Program::per_block, row_width, lanes);
      const bool is_packed = part.is_packed() && has_packs;
      CodedState<Program> state(target, is_packed, part);
      found.bring_up(state, scalars);
      state.store_to(target, is_packed, part, lanes);
    }
  }
}

}  // namespace gpuopt
