// Applies one rule to the rows that a sparse gradient names.
#include "shared/touched_rows.cuh"

namespace gpuopt {

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
template <class Types>
__global__ void __launch_bounds__(piece_threads, 2)
    sum_pieces(const __grid_constant__ TableGradient only_gradient,
               const TableGradient* __restrict__ gradients, long long num_tables,
               const SortedRows<KeyOf<Types>> rows, long long row_width, ComputeOf<Types>* parts,
               int lanes_per_row, const unsigned long long* __restrict__ refused) {
  using Storage = StorageOf<Types>;
  using Real = ComputeOf<Types>;
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

// Updates tables. `many_scalars` has each table's scalars; if it is null, `scalars` has.
template <class Program>
__global__ void sparse_update(const __grid_constant__ TableGradient only_gradient,
                              const TableGradient* __restrict__ gradients, long long num_tables,
                              const __grid_constant__ ArraysOf<Program> only_arrays,
                              const long long* __restrict__ arrays,
                              const SortedRows<KeyOf<Program>> rows,
                              const RealOf<Program>* __restrict__ parts, long long row_width,
                              const __grid_constant__ GivenOf<Program> scalars,
                              const ScalarsOf<Program>* __restrict__ many_scalars,
                              unsigned int* touched, int lanes_per_row,
                              const unsigned long long* __restrict__ refused) {
  update_rows<Program>(Tables{only_gradient, gradients, num_tables}, only_arrays, arrays, rows,
                       parts, row_width, GroupScalars<Program>{scalars, many_scalars},
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
template <class Program, int count>
__device__ __forceinline__ void update_untouched(const Target<Program>& target, long long size,
                                                 long long row_width, const unsigned int* touched,
                                                 const ScalarsOf<Program>& scalars) {
  for (long long i = first_item() * count; i < size; i += items_per_pass() * count) {
    const long long row = i / row_width;
    if (touched[word_of(row)] & bit_of(row)) continue;
    State<Program, count> state(target, i);
    const RealOf<Program> zero[count] = {};
    state.update(zero, scalars);
    state.store_to(target, i);
  }
}

// The same of table number `table`, with the scalars of `sparse_update`; in packs if possible. A
// gradient of 0 needs no clipping factor, which may be infinite.
template <class Program>
__global__ void update_other_rows(const __grid_constant__ ArraysOf<Program> arrays, long long size,
                                  long long row_width,
                                  const __grid_constant__ GivenOf<Program> scalars,
                                  const ScalarsOf<Program>* __restrict__ many_scalars,
                                  long long table, const unsigned int* __restrict__ touched,
                                  const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const GroupScalars<Program> every = {scalars, many_scalars};
  const auto& given = every.given(table);
  const Target<Program> target(arrays.of);
  if (row_width % pack_of<Program> == 0 && target.is_pack_aligned()) {
    update_untouched<Program, pack_of<Program>>(target, size, row_width, touched, given);
  } else {
    update_untouched<Program, 1>(target, size, row_width, touched, given);
  }
}

// Writes the sums of the runs that begin at these sorted positions: for optimizers that see sums
// instead of a rule.
template <class Types>
__global__ void sum_runs(const StorageOf<Types>* __restrict__ grad,
                         const SortedRows<KeyOf<Types>> rows, const long long* __restrict__ begins,
                         long long num_runs, const ComputeOf<Types>* __restrict__ parts,
                         long long row_width, ComputeOf<Types>* sums, int lanes_per_row) {
  const Lanes lanes(lanes_per_row);
  const Parts<const ComputeOf<Types>> all(parts, rows.num_rows, row_width);
  for (long long run = lanes.group; run < num_runs; run += lanes.num_groups) {
    const unsigned int begin = static_cast<unsigned int>(begins[run]);
    for (long long column = lanes.lane; column < row_width; column += lanes.num_lanes) {
      ComputeOf<Types> sum[1];
      sum_run(grad, rows, all, begin, column, sum);
      sums[run * row_width + column] = sum[0];
    }
  }
}

}  // namespace gpuopt
