// Applies one rule to the rows that sparse gradients name, of tables whose slots are in 8 bits, and
// to their other rows. Blocks end at rows.
#include "shared/coded_rows.cuh"

namespace gpuopt {

// Updates tables; see `sparse_update` for the arguments.
template <class Program>
__global__ void update_coded_rows(const __grid_constant__ TableGradient only_gradient,
                                  const TableGradient* __restrict__ gradients, long long num_tables,
                                  const __grid_constant__ CodedArraysOf<Program> only_arrays,
                                  const long long* __restrict__ arrays,
                                  const SortedRows<KeyOf<Program>> rows,
                                  const float* __restrict__ parts, long long row_width,
                                  const __grid_constant__ GivenOf<Program> scalars,
                                  const ScalarsOf<Program>* __restrict__ many_scalars,
                                  unsigned int* touched,
                                  const unsigned long long* __restrict__ refused) {
  if (*refused != 0) return;
  prepare_codes<Program>();
  update_rows_of_codes<Program>(
      Tables{only_gradient, gradients, num_tables}, only_arrays, arrays, rows, parts, row_width,
      GroupScalars<Program>{scalars, many_scalars}, TablesUpToDate(), touched);
}

// Applies the rule, with a gradient of 0, to the rows whose bit in `touched` is not set; see
// `update_other_rows` for the arguments.
template <class Program>
__global__ void update_other_coded_rows(const __grid_constant__ CodedArraysOf<Program> arrays,
                                        long long size, long long row_width,
                                        const __grid_constant__ GivenOf<Program> scalars,
                                        const ScalarsOf<Program>* __restrict__ many_scalars,
                                        long long table, const unsigned int* __restrict__ touched,
                                        const unsigned long long* __restrict__ refused) {
  if (*refused != 0) return;
  const GroupScalars<Program> every = {scalars, many_scalars};
  const auto& given = every.given(table);
  prepare_codes<Program>();
  const CodedTarget<Program> target(arrays.of);
  const bool has_packs = target.has_packs();
  const Lanes lanes(lanes_of_block<Program>(row_width));
  const long long per_row = blocks_of_row<Program>(row_width);
  const long long num_blocks = size / row_width * per_row;
  for (long long block = lanes.group; block < num_blocks; block += lanes.num_groups) {
    long long row = block;
    long long number = 0;  // in the row
    if (per_row != 1) {
      row = block / per_row;
      number = block % per_row;
    }
    if (touched[word_of(row)] & bit_of(row)) continue;
    const LanePart part(Program::per_block, block, row * row_width, number * Program::per_block,
                        row_width, lanes);
    const bool is_packed = part.is_packed() && has_packs;
    CodedState<Program> state(target, is_packed, part);
    const float zero[lane_codes] = {};
    state.update(zero, given);
    state.store_to(target, is_packed, part, lanes);
  }
}

}  // namespace gpuopt
