// Applies one rule to the rows that sparse gradients name, of tables whose slots are in 8 bits, and
// to their other rows. Blocks end at rows.
#include "shared/coded_blocks.cuh"
#include "shared/touched_rows.cuh"

namespace gpuopt {

// The addresses of a variable, of its slots' codes, of their scales, and of the array beside the
// variable, passed by value.
template <class Program>
using CodedArraysOf = Arrays<num_coded_arrays<Program>>;

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
// `sparse_update`: a row has row_width codes, and as many scales as blocks.
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
  using Key = KeyOf<Program>;
  if (*refused != 0) return;
  prepare_codes<Program>();
  const Tables tables = {only_gradient, gradients, num_tables};
  const Lanes lanes(lanes_of_block<Program>(row_width));
  const Parts<const float> all(parts, rows.num_rows, row_width);
  const GroupScalars<Program> every = {scalars, many_scalars};
  const long long per_row = blocks_of_row<Program>(row_width);
  for (long long i = lanes.group; i < rows.num_rows * per_row; i += lanes.num_groups) {
    const long long begin = per_row == 1 ? i : i / per_row;
    if (!begins_run(rows, begin)) continue;
    const Key key = __ldg(&rows.keys[begin]);
    const long long row = static_cast<long long>(key);
    const long long number = i - begin * per_row;
    const long long table = num_tables == 1 ? 0 : tables.number_of(key);
    const GradientOf<Program>* grad = tables.values_of<GradientOf<Program>>(table);
    const LanePart part(Program::per_block, row * per_row + number, row * row_width,
                        number * Program::per_block, row_width, lanes);
    const bool has_rows = (row_width % lane_codes == 0) & part.is_packed();
    // Before the arrays' addresses and the state are loaded: beside them, the gradients of several
    // rows would take too many registers.
    float sum[lane_codes];
    sum_run_of_lane(grad, has_rows && is_pack_aligned(grad), rows, all,
                    static_cast<unsigned int>(begin), part, sum);
    CodedTarget<Program> target =
        num_tables == 1 ? CodedTarget<Program>(only_arrays.of)
                        : CodedTarget<Program>(arrays + table * num_coded_arrays<Program>);
    target.count_from(-tables.first_key_of(table) * row_width);
    target.first_number = tables.first_number_of(table);
    const bool is_packed = has_rows && target.has_packs();
    CodedState<Program> state(target, is_packed, part);
    state.update(sum, part.count, every.of(table));
    state.store_to(target, is_packed, part, lanes);
    if (touched != nullptr && number == 0 && lanes.lane == 0) {
      atomicAnd(&touched[word_of(row)], ~bit_of(row));
    }
  }
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
    const long long row = per_row == 1 ? block : block / per_row;
    if (touched[word_of(row)] & bit_of(row)) continue;
    const LanePart part(Program::per_block, block, row * row_width,
                        (block - row * per_row) * Program::per_block, row_width, lanes);
    const bool is_packed = part.is_packed() && has_packs;
    CodedState<Program> state(target, is_packed, part);
    const float zero[lane_codes] = {};
    state.update(zero, part.count, given);
    state.store_to(target, is_packed, part, lanes);
  }
}

}  // namespace gpuopt
