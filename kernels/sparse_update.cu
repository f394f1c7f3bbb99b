// Applies one rule to the rows that a sparse gradient names.
#include "shared/touched_rows.cuh"

namespace gpuopt {

// A block sums all pieces of a stretch, with up to a warp for each.
constexpr int piece_threads = pieces_per_stretch * warp_size;

// Sums the part of the run that goes on at `begin`, where a piece begins.
template <class Storage, int count, class Key>
__device__ __forceinline__ void sum_piece(const Storage* grad, const SortedRows<Key>& rows,
                                          unsigned int begin, long long row_width,
                                          const Lanes& lanes, Compute<Storage>* part) {
  const unsigned int end = end_of_part<piece_size>(rows, begin);
  for (long long column = lanes.lane * count; column < row_width;
       column += lanes.num_lanes * count) {
    Compute<Storage> sum[count];
    sum_gradients<8>(grad, rows, begin, end, row_width, column, sum);
    store_part(part + column, sum);
  }
}

// Adds up the parts of the run that goes on at `begin`, where a stretch begins.
template <class Real, int count, class Key>
__device__ __forceinline__ void sum_stretch(const Parts<Real>& all, const SortedRows<Key>& rows,
                                            unsigned int begin, const Lanes& lanes, Real* part) {
  const Key key = __ldg(&rows.keys[begin]);
  const unsigned int end = end_of_part<stretch_size>(rows, begin);
  for (long long column = lanes.lane * count; column < all.row_width;
       column += lanes.num_lanes * count) {
    Real sum[count];
    for (int i = 0; i < count; ++i) sum[i] = Real(-0.0);
    add_parts<piece_size>(all, rows, key, begin, end, column, sum);
    store_part(part + column, sum);
  }
}

// Sums the parts that runs have in the pieces, and then in the stretches, after their first ones.
template <class Storage, class Key>
__global__ void __launch_bounds__(piece_threads, 2)
    sum_pieces(const __grid_constant__ TableGradient only_gradient,
               const TableGradient* __restrict__ gradients, long long num_tables,
               const SortedRows<Key> rows, long long row_width, Compute<Storage>* parts,
               int lanes_per_row, const unsigned long long* __restrict__ refused) {
  using Real = Compute<Storage>;
  const Tables tables = {only_gradient, gradients, num_tables};
  const Lanes lanes(lanes_per_row);
  const Parts<Real> all(parts, rows.num_rows, row_width);
  const bool is_refused = *refused != 0;
  const long long at_once = piece_threads / lanes_per_row;  // whole stretches
  const long long mine = threadIdx.x / lanes_per_row;
  // So that no load depends on a condition, position 0 is looked at where there is none.
  const auto goes_on = [&](long long begin) {
    const bool is_there = begin < rows.num_rows;
    return is_there & !(is_refused | begins_run(rows, is_there ? begin : 0));
  };
  for (long long first = blockIdx.x * at_once; first * piece_size < rows.num_rows;
       first += gridDim.x * at_once) {
    const long long begin = (first + mine) * piece_size;
    const long long stretch = first / pieces_per_stretch + mine;
    const long long stretch_begin = stretch * stretch_size;
    const bool has_stretch = (mine < at_once / pieces_per_stretch) & goes_on(stretch_begin);
    if (goes_on(begin)) {
      const long long table = num_tables == 1 ? 0 : tables.number_of(__ldg(&rows.keys[begin]));
      const Storage* grad = tables.values_of<Storage>(table);
      Real* part = all.template part<piece_size>(first + mine);
      if (row_width % pack_size<Storage> == 0 && is_pack_aligned(grad)) {
        sum_piece<Storage, pack_size<Storage>>(grad, rows, begin, row_width, lanes, part);
      } else {
        sum_piece<Storage, 1>(grad, rows, begin, row_width, lanes, part);
      }
    }
    __syncthreads();
    if (has_stretch) {
      Real* part = all.template part<stretch_size>(stretch);
      if (row_width % pack_size<Real> == 0) {
        sum_stretch<Real, pack_size<Real>>(all, rows, stretch_begin, lanes, part);
      } else {
        sum_stretch<Real, 1>(all, rows, stretch_begin, lanes, part);
      }
    }
  }
}

// Updates tables of one group.
template <class Rule, class Storage, class Key>
__global__ void sparse_update(const __grid_constant__ TableGradient only_gradient,
                              const TableGradient* __restrict__ gradients, long long num_tables,
                              const __grid_constant__ ArraysOf<Rule, Storage> only_arrays,
                              const long long* __restrict__ arrays, const SortedRows<Key> rows,
                              const Compute<Storage>* __restrict__ parts, long long row_width,
                              const __grid_constant__ Scalars<Rule, Storage> scalars,
                              unsigned int* touched, int lanes_per_row,
                              const unsigned long long* __restrict__ refused) {
  update_rows<Rule, Storage>(Tables{only_gradient, gradients, num_tables}, only_arrays, arrays,
                             rows, parts, row_width, ScalarsOfOne<Rule, Storage>{scalars},
                             TablesUpToDate(), touched, lanes_per_row, refused);
}

// Updates tables of several groups. `many_scalars` has each table's scalars; if it is null,
// `few_scalars` has.
template <class Rule, class Storage, class Key>
__global__ void sparse_update_of_groups(
    const __grid_constant__ TableGradient only_gradient,
    const TableGradient* __restrict__ gradients, long long num_tables,
    const __grid_constant__ ArraysOf<Rule, Storage> only_arrays,
    const long long* __restrict__ arrays, const SortedRows<Key> rows,
    const Compute<Storage>* __restrict__ parts, long long row_width,
    const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
    const Scalars<Rule, Storage>* __restrict__ many_scalars, unsigned int* touched,
    int lanes_per_row, const unsigned long long* __restrict__ refused) {
  update_rows<Rule, Storage>(Tables{only_gradient, gradients, num_tables}, only_arrays, arrays,
                             rows, parts, row_width,
                             ScalarsOfGroups<Rule, Storage>{few_scalars, many_scalars},
                             TablesUpToDate(), touched, lanes_per_row, refused);
}

// Sets the bit of each row that has a gradient.
template <class Key>
__global__ void mark_rows(const SortedRows<Key> rows, unsigned int* touched,
                          const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  for (long long i = first_item(); i < rows.num_rows; i += items_per_pass()) {
    if (!begins_run(rows, i)) continue;
    const Key row = __ldg(&rows.keys[i]);
    atomicOr(&touched[word_of(row)], bit_of(row));
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

// The same, in packs if possible.
template <class Rule, class Storage>
__device__ __forceinline__ void update_others(const ArraysOf<Rule, Storage>& arrays, long long size,
                                              long long row_width,
                                              const Scalars<Rule, Storage>& scalars,
                                              const unsigned int* touched) {
  const Target<Rule, Storage> target(arrays.of);
  if (row_width % pack_size<Storage> == 0 && target.is_pack_aligned()) {
    update_untouched<Rule, Storage, pack_size<Storage>>(target, size, row_width, touched, scalars);
  } else {
    update_untouched<Rule, Storage, 1>(target, size, row_width, touched, scalars);
  }
}

template <class Rule, class Storage>
__global__ void update_other_rows(const __grid_constant__ ArraysOf<Rule, Storage> arrays,
                                  long long size, long long row_width,
                                  const __grid_constant__ Scalars<Rule, Storage> scalars,
                                  const unsigned int* __restrict__ touched,
                                  const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  update_others<Rule, Storage>(arrays, size, row_width, scalars, touched);
}

// The same of table number `table`, with the scalars of `sparse_update_of_groups`. A gradient of 0
// needs no factor, which may be infinite.
template <class Rule, class Storage>
__global__ void update_other_rows_of_groups(
    const __grid_constant__ ArraysOf<Rule, Storage> arrays, long long size, long long row_width,
    const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
    const Scalars<Rule, Storage>* __restrict__ many_scalars, long long table,
    const unsigned int* __restrict__ touched, const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const ScalarsOfGroups<Rule, Storage> scalars_of{few_scalars, many_scalars};
  update_others<Rule, Storage>(arrays, size, row_width, scalars_of.given(table), touched);
}

// Writes the sums of the runs that begin at these sorted positions: for optimizers that see sums
// instead of a rule.
template <class Storage, class Key>
__global__ void sum_runs(const Storage* __restrict__ grad, const SortedRows<Key> rows,
                         const long long* __restrict__ begins, long long num_runs,
                         const Compute<Storage>* __restrict__ parts, long long row_width,
                         Compute<Storage>* sums, int lanes_per_row) {
  const Lanes lanes(lanes_per_row);
  const Parts<const Compute<Storage>> all(parts, rows.num_rows, row_width);
  for (long long run = lanes.group; run < num_runs; run += lanes.num_groups) {
    const unsigned int begin = static_cast<unsigned int>(begins[run]);
    for (long long column = lanes.lane; column < row_width; column += lanes.num_lanes) {
      Compute<Storage> sum[1];
      sum_run(grad, rows, all, begin, column, sum);
      sums[run * row_width + column] = sum[0];
    }
  }
}

}  // namespace gpuopt
