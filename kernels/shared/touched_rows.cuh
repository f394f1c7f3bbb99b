// Applies a rule to the rows that sparse gradients name, once they are sorted and the parts of runs
// are summed.
#pragma once
#include "lanes.cuh"
#include "row_update.cuh"
#include "runs.cuh"
#include "scalars.cuh"
#include "tables.cuh"

namespace gpuopt {

// Tables all of whose rows are up to date; `LateTables` of late_rows.cuh are others.
struct TablesUpToDate {
  // Whether a row's steps are counted: then the same threads update all of it.
  static constexpr bool goes_by_rows = false;

  struct Row {
    template <class State, class Gradient, class Scalars>
    __device__ __forceinline__ void update(State& state, const Gradient& gradient,
                                           const Scalars& scalars) const {
      state.update(gradient, scalars);
    }
    __device__ __forceinline__ void note_step(const Lanes&) const {}
  };

  __device__ __forceinline__ Row row(long long, long long) const { return {}; }
};

template <class Program, int count, class Key, class Row>
__device__ __forceinline__ void update_row(const Target<Program>& target, long long row,
                                           const GradientOf<Program>* grad,
                                           const SortedRows<Key>& rows,
                                           const Parts<const RealOf<Program>>& parts,
                                           unsigned int begin, const Lanes& lanes,
                                           const ScalarsOf<Program>& scalars, const Row& behind) {
  for (long long column = lanes.lane * count; column < parts.row_width;
       column += lanes.num_lanes * count) {
    const long long at = row * parts.row_width + column;
    State<Program, count> state(target, at);
    RealOf<Program> sum[count];
    sum_run(grad, rows, parts, begin, column, sum);
    behind.update(state, sum, scalars);
    state.store_to(target, at);
  }
}

// Applies the rule to each touched row and the sum of its gradients. `only_arrays` are the variable
// and its slots: each at the address that key 0 would have. If there are several tables, `arrays`
// has the same of each. If `touched` is not null, `mark_rows` has set bits in it, which are cleared
// again. Each table has scalars of its own if there are several groups. `behind` says which steps
// rows have missed: they make these first. A slot of rows has one number where other arrays have a
// row.
template <class Program, class Key, class Behind>
__device__ __forceinline__ void update_rows(
    const Tables& tables, const ArraysOf<Program>& only_arrays,
    const long long* __restrict__ arrays, const SortedRows<Key>& rows,
    const RealOf<Program>* __restrict__ parts, long long row_width,
    const GroupScalars<Program>& scalars, const Behind& behind, unsigned int* touched,
    int lanes_per_row, const unsigned long long* __restrict__ refused) {
  const long long num_tables = tables.count;
  const Lanes lanes(lanes_per_row);
  const Parts<const RealOf<Program>> all(parts, rows.num_rows, row_width);
  const bool is_refused = *refused != 0;
  for (long long begin = lanes.group; begin < rows.num_rows; begin += lanes.num_groups) {
    if (is_refused | !begins_run(rows, begin)) continue;
    const Key key = __ldg(&rows.keys[begin]);
    const long long row = static_cast<long long>(key);
    const long long table = num_tables == 1 ? 0 : tables.number_of(key);
    const GradientOf<Program>* grad = tables.values_of<GradientOf<Program>>(table);
    Target<Program> target = num_tables == 1
                                 ? Target<Program>(only_arrays.of)
                                 : Target<Program>(arrays + table * num_arrays<Program>);
    target.count_from(-tables.first_key_of(table) * row_width);
    target.first_number = tables.first_number_of(table);
    const auto missed = behind.row(table, row);
    if constexpr (Program::num_row_slots > 0) {
      const auto gradient_at = [&](long long column, auto& sum) {
        sum_run(grad, rows, all, begin, column, sum);
      };
      update_whole_row(target, row, row_width, lanes, begins_pack<Program>(grad), gradient_at,
                       scalars.of(table));
    } else if (row_width % pack_of<Program> == 0 && target.is_pack_aligned() &&
               begins_pack<Program>(grad)) {
      update_row<Program, pack_of<Program>>(target, row, grad, rows, all, begin, lanes,
                                            scalars.of(table), missed);
    } else {
      update_row<Program, 1>(target, row, grad, rows, all, begin, lanes, scalars.of(table), missed);
    }
    missed.note_step(lanes);
    if (touched != nullptr && lanes.lane == 0) atomicAnd(&touched[word_of(row)], ~bit_of(row));
  }
}

}  // namespace gpuopt
