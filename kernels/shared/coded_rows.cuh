// Applies a rule to the rows that sparse gradients name, of tables whose slots are in 8 bits.
// Blocks end at rows.
#pragma once
#include "coded_blocks.cuh"
#include "touched_rows.cuh"

namespace gpuopt {

// Sums the gradients of a run for the elements of a lane.
template <class Stored, class Key>
__device__ __forceinline__ void sum_run_of_lane(const Stored* grad, bool is_packed,
                                                const SortedRows<Key>& rows,
                                                const Parts<const float>& parts, unsigned int begin,
                                                const LanePart& part, float (&sums)[lane_codes]) {
  constexpr int pack = pack_size<Stored>;
  if (is_packed) {
#pragma unroll
    for (int first = 0; first < lane_codes; first += pack) {
      float sum[pack];
      sum_run(grad, rows, parts, begin, part.column + first, sum);
#pragma unroll
      for (int k = 0; k < pack; ++k) sums[first + k] = sum[k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < lane_codes; ++k) sums[k] = 0;
#pragma unroll 1  // eight copies of the sum would fill the cache of instructions
    for (int at = 0; at < part.count; ++at) {
      float sum[1];
      sum_run(grad, rows, parts, begin, part.column + at, sum);
#pragma unroll
      for (int k = 0; k < lane_codes; ++k) sums[k] = k == at ? sum[0] : sums[k];
    }
  }
}

// Applies the rule to each touched row and the sum of its gradients. The arguments are those of
// `update_rows`: a row has row_width codes, and as many scales as blocks.
template <class Program, class Key, class Behind>
__device__ __forceinline__ void update_rows_of_codes(
    const Tables& tables, const CodedArraysOf<Program>& only_arrays,
    const long long* __restrict__ arrays, const SortedRows<Key>& rows,
    const float* __restrict__ parts, long long row_width, const GroupScalars<Program>& scalars,
    const Behind& behind, unsigned int* touched) {
  const Lanes lanes(lanes_of_block<Program>(row_width));
  const Parts<const float> all(parts, rows.num_rows, row_width);
  const long long per_row = blocks_of_row<Program>(row_width);
  // Lanes take one block after the other of a row, or one.
  const long long at_once = Behind::goes_by_rows ? per_row : 1;
  const long long per_run = Behind::goes_by_rows ? 1 : per_row;
  for (long long i = lanes.group; i < rows.num_rows * per_run; i += lanes.num_groups) {
    long long begin = i;
    long long first = 0;
    if (per_run != 1) {
      begin = i / per_run;
      first = i % per_run;
    }
    if (!begins_run(rows, begin)) continue;
    const Key key = __ldg(&rows.keys[begin]);
    const long long row = static_cast<long long>(key);
    const long long table = tables.count == 1 ? 0 : tables.number_of(key);
    const GradientOf<Program>* grad = tables.values_of<GradientOf<Program>>(table);
    const auto missed = behind.row(table, row);
    for (long long number = first; number < first + at_once; ++number) {
      const LanePart part(Program::per_block, row * per_row + number, row * row_width,
                          number * Program::per_block, row_width, lanes);
      const bool has_rows = (row_width % lane_codes == 0) & part.is_packed();
      // Before the arrays' addresses and the state are loaded: beside them, the gradients of
      // several rows would take too many registers.
      float sum[lane_codes];
      sum_run_of_lane(grad, has_rows && is_pack_aligned(grad), rows, all,
                      static_cast<unsigned int>(begin), part, sum);
      CodedTarget<Program> target =
          tables.count == 1 ? CodedTarget<Program>(only_arrays.of)
                            : CodedTarget<Program>(arrays + table * num_coded_arrays<Program>);
      target.count_from(-tables.first_key_of(table) * row_width);
      target.first_number = tables.first_number_of(table);
      const bool is_packed = has_rows && target.has_packs();
      CodedState<Program> state(target, is_packed, part);
      missed.update(state, sum, scalars.of(table));
      state.store_to(target, is_packed, part, lanes);
    }
    missed.note_step(lanes);
    if (touched != nullptr && first == 0 && lanes.lane == 0) {
      atomicAnd(&touched[word_of(row)], ~bit_of(row));
    }
  }
}

}  // namespace gpuopt
