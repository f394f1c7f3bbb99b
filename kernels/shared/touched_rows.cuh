// Applies a rule to the rows that sparse gradients name, once they are sorted and the parts of runs
// are summed.
#pragma once
#include "lanes.cuh"
#include "row_update.cuh"
#include "runs.cuh"
#include "tables.cuh"

namespace gpuopt {

// The scalars of tables of one group.
template <class Rule, class Storage>
struct ScalarsOfOne {
  const Scalars<Rule, Storage>& scalars;

  __device__ __forceinline__ const Scalars<Rule, Storage>& operator()(long long) const {
    return scalars;
  }

  // Returns one of a table's, by its place, as it was given.
  __device__ __forceinline__ Compute<Storage> number(long long, int place) const {
    return reinterpret_cast<const Compute<Storage>*>(&scalars)[place];
  }
};

// The scalars of tables of several groups: of each table. If `many` is null, `few` has them.
template <class Rule, class Storage>
struct ScalarsOfGroups {
  const FewScalarsOf<Rule, Storage>& few_scalars;
  const Scalars<Rule, Storage>* __restrict__ many_scalars;

  // A clipped rule has the number of a norm in the place of the factor.
  __device__ __forceinline__ Scalars<Rule, Storage> given(long long table) const {
    const long long place = table + first_group(few_scalars);
    return many_scalars == nullptr ? few_scalars.of[place] : many_scalars[place];
  }

  __device__ __forceinline__ Scalars<Rule, Storage> operator()(long long table) const {
    if constexpr (Rule::is_clipped) {
      return with_factor<Rule, Storage>(given(table), few_scalars);
    } else {
      return given(table);
    }
  }

  __device__ __forceinline__ Compute<Storage> number(long long table, int place) const {
    const long long at = table + first_group(few_scalars);
    const auto* few = reinterpret_cast<const Compute<Storage>*>(few_scalars.of + at);
    const auto* many = reinterpret_cast<const Compute<Storage>*>(many_scalars + at);
    return many_scalars == nullptr ? few[place] : __ldg(many + place);
  }
};

// Tables all of whose rows are up to date; `LateTables` of late_rows.cuh are others.
struct TablesUpToDate {
  struct Row {
    template <class State, class Gradient, class Scalars>
    __device__ __forceinline__ void update(State& state, const Gradient& gradient,
                                           const Scalars& scalars) const {
      state.update(gradient, scalars);
    }
    __device__ __forceinline__ void count_step(const Lanes&) const {}
  };

  __device__ __forceinline__ Row row(long long, long long) const { return {}; }
};

template <class Rule, class Storage, int count, class Key, class Row>
__device__ __forceinline__ void update_row(
    const Target<Rule, Storage>& target, long long row, const StoredGradient<Storage>* grad,
    const SortedRows<Key>& rows, const Parts<const Compute<Storage>>& parts, unsigned int begin,
    const Lanes& lanes, const Scalars<Rule, Storage>& scalars, const Row& behind) {
  for (long long column = lanes.lane * count; column < parts.row_width;
       column += lanes.num_lanes * count) {
    const long long at = row * parts.row_width + column;
    State<Rule, Storage, count> state(target, at);
    Compute<Storage> sum[count];
    sum_run(grad, rows, parts, begin, column, sum);
    behind.update(state, sum, scalars);
    state.store_to(target, at);
  }
}

// Applies the rule to each touched row and the sum of its gradients. `only_arrays` are the variable
// and its slots: each at the address that key 0 would have. If there are several tables, `arrays`
// has the same of each. If `touched` is not null, `mark_rows` has set bits in it, which are cleared
// again. `scalars_of` returns the scalars for a table's number, and `behind` says which steps rows
// have missed: they make these first. A slot of rows has one number where other arrays have a row.
template <class Rule, class Storage, class Key, class ScalarsOf, class Behind>
__device__ __forceinline__ void update_rows(
    const Tables& tables, const ArraysOf<Rule, Storage>& only_arrays,
    const long long* __restrict__ arrays, const SortedRows<Key>& rows,
    const Compute<Storage>* __restrict__ parts, long long row_width, const ScalarsOf& scalars_of,
    const Behind& behind, unsigned int* touched, int lanes_per_row,
    const unsigned long long* __restrict__ refused) {
  const long long num_tables = tables.count;
  const Lanes lanes(lanes_per_row);
  const Parts<const Compute<Storage>> all(parts, rows.num_rows, row_width);
  const bool is_refused = *refused != 0;
  for (long long begin = lanes.group; begin < rows.num_rows; begin += lanes.num_groups) {
    if (is_refused | !begins_run(rows, begin)) continue;
    const Key key = __ldg(&rows.keys[begin]);
    const long long row = static_cast<long long>(key);
    const long long table = num_tables == 1 ? 0 : tables.number_of(key);
    const StoredGradient<Storage>* grad = tables.values_of<StoredGradient<Storage>>(table);
    Target<Rule, Storage> target =
        num_tables == 1 ? Target<Rule, Storage>(only_arrays.of)
                        : Target<Rule, Storage>(arrays + table * num_arrays<Rule, Storage>);
    if constexpr (Rule::is_rounded) target.count_from(-tables.first_key_of(table) * row_width);
    const auto missed = behind.row(table, row);
    if constexpr (Rule::num_row_slots > 0) {
      const auto gradient_at = [&](long long column, auto& sum) {
        sum_run(grad, rows, all, begin, column, sum);
      };
      update_whole_row(target, row, row_width, lanes, begins_pack<Storage>(grad), gradient_at,
                       scalars_of(table));
    } else if (row_width % pack_size<Storage> == 0 && target.is_pack_aligned() &&
               begins_pack<Storage>(grad)) {
      update_row<Rule, Storage, pack_size<Storage>>(target, row, grad, rows, all, begin, lanes,
                                                    scalars_of(table), missed);
    } else {
      update_row<Rule, Storage, 1>(target, row, grad, rows, all, begin, lanes, scalars_of(table),
                                   missed);
    }
    missed.count_step(lanes);
    if (touched != nullptr && lanes.lane == 0) atomicAnd(&touched[word_of(row)], ~bit_of(row));
  }
}

}  // namespace gpuopt
