// Applies one rule to the rows that a sparse gradient names.
#include "shared/grid.cuh"
#include "shared/runs.cuh"
#include "shared/tables.cuh"

namespace gpuopt {

// Threads that work on one run or piece together, along a row: each takes every num_lanes-th
// element, or pack of them.
struct Lanes {
  long long group;       // the number of the run or piece that they begin with
  long long num_groups;  // how many runs or pieces all threads work on at once
  int lane;
  int num_lanes;

  // Precondition: lanes_per_row is a power of 2, and at most a warp.
  __device__ __forceinline__ explicit Lanes(int lanes_per_row) {
    const int shift = __ffs(lanes_per_row) - 1;
    num_lanes = lanes_per_row;
    group = first_item() >> shift;
    num_groups = items_per_pass() >> shift;
    lane = static_cast<int>(threadIdx.x) & (lanes_per_row - 1);
  }
};

// Calls sum(run_begin, begin, end, number) for each part, from `begin` to `end`, that a run of more
// than 2 * size occurrences has in the piece or stretch number `number`, of `size` positions.
template <int size, class Key, class Sum>
__device__ __forceinline__ void for_each_part(const SortedRows<Key>& rows, const Lanes& lanes,
                                              long long num_rows, Sum sum) {
  constexpr int pieces = size / piece_size;
  const long long how_many = (num_rows + size - 1) / size;
  for (long long number = lanes.group; number < how_many; number += lanes.num_groups) {
    const unsigned int begin = static_cast<unsigned int>(number * size);
    const unsigned int end =
        num_rows < begin + size ? static_cast<unsigned int>(num_rows) : begin + size;
    // The runs at the first position and at the one after the last: no other can be long enough.
    const unsigned int first_run = __ldg(&rows.run_of_piece[number * pieces]);
    const unsigned int last_run =
        number + 1 < how_many ? __ldg(&rows.run_of_piece[(number + 1) * pieces]) : first_run;
    for (unsigned int run = first_run;; run = last_run) {
      const unsigned int run_begin = __ldg(&rows.begins[run]);
      const unsigned int run_end = __ldg(&rows.begins[run + 1]);
      if (run_end - run_begin > 2u * size && run_begin < end) {
        sum(run_begin, run_begin > begin ? run_begin : begin, run_end < end ? run_end : end,
            number);
      }
      if (run == last_run) break;
    }
  }
}

template <class Storage, int count>
__device__ __forceinline__ void sum_one_piece(const Storage* grad, const unsigned int* positions,
                                              unsigned int begin, unsigned int end,
                                              long long row_width, const Lanes& lanes,
                                              Compute<Storage>* part) {
  for (long long column = lanes.lane * count; column < row_width;
       column += lanes.num_lanes * count) {
    Compute<Storage> sum[count];
    sum_gradients<8>(grad, positions, begin, end, row_width, column, sum);
    store_part(part + column, sum);
  }
}

// Sums the parts of long runs that lie in each piece.
template <class Storage, class Key>
__global__ void sum_pieces(const __grid_constant__ TableGradient only_gradient,
                           const TableGradient* __restrict__ gradients, long long num_tables,
                           const SortedRows<Key> rows, long long row_width, Compute<Storage>* parts,
                           int lanes_per_row, const unsigned long long* __restrict__ refused) {
  const Tables tables = {only_gradient, gradients, num_tables};
  const long long num_rows = *refused ? 0 : rows.num_rows;
  const Lanes lanes(lanes_per_row);
  const Parts<Compute<Storage>> all(parts, rows.num_rows, row_width);
  for_each_part<piece_size>(
      rows, lanes, num_rows,
      [&](unsigned int run_begin, unsigned int begin, unsigned int end, long long piece) {
        Compute<Storage>* part = all.template part<piece_size>(piece, run_begin);
        const long long table = num_tables == 1 ? 0 : tables.number_of(__ldg(&rows.keys[begin]));
        const Storage* grad = tables.values_of<Storage>(table);
        if (row_width % pack_size<Storage> == 0 && is_pack_aligned(grad)) {
          sum_one_piece<Storage, pack_size<Storage>>(grad, rows.positions, begin, end, row_width,
                                                     lanes, part);
        } else {
          sum_one_piece<Storage, 1>(grad, rows.positions, begin, end, row_width, lanes, part);
        }
      });
}

template <class Real, int count>
__device__ __forceinline__ void sum_one_stretch(const Parts<Real>& all, unsigned int run_begin,
                                                unsigned int begin, unsigned int end,
                                                const Lanes& lanes, Real* part) {
  for (long long column = lanes.lane * count; column < all.row_width;
       column += lanes.num_lanes * count) {
    Real sum[count];
    sum_parts<piece_size>(all, run_begin, begin, end, column, sum);
    store_part(part + column, sum);
  }
}

// Adds up the parts of very long runs that lie in each stretch.
template <class Real, class Key>
__global__ void sum_stretches(const SortedRows<Key> rows, long long row_width, Real* parts,
                              int lanes_per_row, const unsigned long long* __restrict__ refused) {
  const long long num_rows = *refused ? 0 : rows.num_rows;
  const Lanes lanes(lanes_per_row);
  const Parts<Real> all(parts, rows.num_rows, row_width);
  for_each_part<stretch_size>(
      rows, lanes, num_rows,
      [&](unsigned int run_begin, unsigned int begin, unsigned int end, long long stretch) {
        Real* part = all.template part<stretch_size>(stretch, run_begin);
        if (row_width % pack_size<Real> == 0) {
          sum_one_stretch<Real, pack_size<Real>>(all, run_begin, begin, end, lanes, part);
        } else {
          sum_one_stretch<Real, 1>(all, run_begin, begin, end, lanes, part);
        }
      });
}

template <class Storage, int count>
__device__ __forceinline__ void sum_run(const Storage* grad, const unsigned int* positions,
                                        const Parts<const Compute<Storage>>& parts,
                                        unsigned int begin, unsigned int end, long long column,
                                        Compute<Storage> (&sum)[count]) {
  if (end - begin > very_long_run) {
    sum_parts<stretch_size>(parts, begin, begin, end, column, sum);
  } else if (end - begin > long_run) {
    sum_parts<piece_size>(parts, begin, begin, end, column, sum);
  } else {
    sum_gradients<4>(grad, positions, begin, end, parts.row_width, column, sum);
  }
}

template <class Rule, class Storage, int count>
__device__ __forceinline__ void update_row(const Target<Rule, Storage>& target, long long row,
                                           const Storage* grad, const unsigned int* positions,
                                           const Parts<const Compute<Storage>>& parts,
                                           unsigned int begin, unsigned int end, const Lanes& lanes,
                                           const Scalars<Rule, Storage>& scalars) {
  for (long long column = lanes.lane * count; column < parts.row_width;
       column += lanes.num_lanes * count) {
    const long long at = row * parts.row_width + column;
    State<Rule, Storage, count> state(target, at);
    Compute<Storage> sum[count];
    sum_run(grad, positions, parts, begin, end, column, sum);
    state.update(sum, scalars);
    state.store_to(target, at);
  }
}

// Applies the rule to each touched row and the sum of its gradients. `only_arrays` are the variable
// and its slots: each at the address that key 0 would have. If there are several tables, `arrays`
// has the same of each. If `touched` is not null, `write_runs` has set bits in it, which are
// cleared again.
template <class Rule, class Storage, class Key>
__global__ void sparse_update(const __grid_constant__ TableGradient only_gradient,
                              const TableGradient* __restrict__ gradients, long long num_tables,
                              const __grid_constant__ ArraysOf<Rule> only_arrays,
                              const long long* __restrict__ arrays, const SortedRows<Key> rows,
                              const Compute<Storage>* __restrict__ parts, long long row_width,
                              const __grid_constant__ Scalars<Rule, Storage> scalars,
                              unsigned int* touched, int lanes_per_row,
                              const unsigned long long* __restrict__ refused) {
  const long long num_runs = *refused ? 0 : __ldg(rows.num_runs);
  const Tables tables = {only_gradient, gradients, num_tables};
  const Lanes lanes(lanes_per_row);
  const Parts<const Compute<Storage>> all(parts, rows.num_rows, row_width);
  for (long long run = lanes.group; run < num_runs; run += lanes.num_groups) {
    const unsigned int begin = __ldg(&rows.begins[run]);
    const unsigned int end = __ldg(&rows.begins[run + 1]);
    const Key key = __ldg(&rows.keys[begin]);
    const long long row = static_cast<long long>(key);
    const long long table = num_tables == 1 ? 0 : tables.number_of(key);
    const Storage* grad = tables.values_of<Storage>(table);
    const Target<Rule, Storage> target =
        num_tables == 1 ? Target<Rule, Storage>(only_arrays)
                        : Target<Rule, Storage>(arrays + table * (1 + Rule::num_slots), 1);
    if (row_width % pack_size<Storage> == 0 && target.is_pack_aligned() && is_pack_aligned(grad)) {
      update_row<Rule, Storage, pack_size<Storage>>(target, row, grad, rows.positions, all, begin,
                                                    end, lanes, scalars);
    } else {
      update_row<Rule, Storage, 1>(target, row, grad, rows.positions, all, begin, end, lanes,
                                   scalars);
    }
    if (touched != nullptr && lanes.lane == 0) atomicAnd(&touched[word_of(row)], ~bit_of(row));
  }
}

// Applies the rule, with a gradient of 0, to the rows whose bit in `touched` is not set.
template <class Rule, class Storage, int count>
__device__ __forceinline__ void update_untouched(const Target<Rule, Storage>& target,
                                                 long long size, long long row_width,
                                                 const unsigned int* touched,
                                                 const Scalars<Rule, Storage>& scalars) {
  for (long long i = first_item() * count; i < size; i += items_per_pass() * count) {
    const long long row = i / row_width;
    if (touched[word_of(row)] & bit_of(row)) continue;
    State<Rule, Storage, count> state(target, i);
    const Compute<Storage> zero[count] = {};
    state.update(zero, scalars);
    state.store_to(target, i);
  }
}

template <class Rule, class Storage>
__global__ void update_other_rows(const __grid_constant__ ArraysOf<Rule> arrays, long long size,
                                  long long row_width,
                                  const __grid_constant__ Scalars<Rule, Storage> scalars,
                                  const unsigned int* __restrict__ touched,
                                  const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const Target<Rule, Storage> target(arrays);
  if (row_width % pack_size<Storage> == 0 && target.is_pack_aligned()) {
    update_untouched<Rule, Storage, pack_size<Storage>>(target, size, row_width, touched, scalars);
  } else {
    update_untouched<Rule, Storage, 1>(target, size, row_width, touched, scalars);
  }
}

// Writes the sum of each run: for optimizers that see sums instead of a rule.
template <class Storage, class Key>
__global__ void sum_runs(const Storage* __restrict__ grad, const SortedRows<Key> rows,
                         const Compute<Storage>* __restrict__ parts, long long row_width,
                         Compute<Storage>* sums, int lanes_per_row,
                         const unsigned long long* __restrict__ refused) {
  const long long num_runs = *refused ? 0 : __ldg(rows.num_runs);
  const Lanes lanes(lanes_per_row);
  const Parts<const Compute<Storage>> all(parts, rows.num_rows, row_width);
  for (long long run = lanes.group; run < num_runs; run += lanes.num_groups) {
    const unsigned int begin = __ldg(&rows.begins[run]);
    const unsigned int end = __ldg(&rows.begins[run + 1]);
    for (long long column = lanes.lane; column < row_width; column += lanes.num_lanes) {
      Compute<Storage> sum[1];
      sum_run(grad, rows.positions, all, begin, end, column, sum);
      sums[run * row_width + column] = sum[0];
    }
  }
}

}  // namespace gpuopt
