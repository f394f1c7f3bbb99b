// The norm of sparse gradients, whose equal rows are added up first.
#include "shared/lanes.cuh"
#include "shared/loss_scaling.cuh"
#include "shared/norms.cuh"
#include "shared/row_update.cuh"
#include "shared/runs.cuh"
#include "shared/tables.cuh"

namespace gpuopt {

// Adds up the squares of a run's sums, along the lanes of a row: always in the same order, whether
// packs are aligned or not. If it `decides`, they are NaN where a sum is not finite, and there
// alone.
template <bool decides, class Storage, class Key>
__device__ __forceinline__ double squares_of_run(const Storage* grad, const SortedRows<Key>& rows,
                                                 const Parts<const Compute<Storage>>& parts,
                                                 unsigned int begin, const Lanes& lanes) {
  constexpr int pack = pack_size<Storage>;
  const bool has_packs = parts.row_width % pack == 0;
  const int count = has_packs ? pack : 1;
  double squares = 0;
  const auto add = [&](double x) {
    const double counted = decides ? nan_unless_finite(x) : x;
    squares += counted * counted;
  };
  for (long long column = lanes.lane * count; column < parts.row_width;
       column += lanes.num_lanes * count) {
    if (has_packs && is_pack_aligned(grad)) {
      Compute<Storage> sum[pack];
      sum_run(grad, rows, parts, begin, column, sum);
#pragma unroll
      for (int k = 0; k < pack; ++k) add(static_cast<double>(sum[k]));
    } else {
#pragma unroll 1
      for (int k = 0; k < count; ++k) {
        Compute<Storage> sum[1];
        sum_run(grad, rows, parts, begin, column + k, sum);
        add(static_cast<double>(sum[0]));
      }
    }
  }
  return sum_of_lanes(squares, lanes);
}

// Writes the sum of squares of each `measured_rows` positions; 0 for rows that are refused.
template <class Storage, class Key, class Decision>
__device__ __forceinline__ void sum_rows(const Tables& tables, const SortedRows<Key>& rows,
                                         const Compute<Storage>* run_parts, long long row_width,
                                         int lanes_per_row, const unsigned long long* refused,
                                         double* parts, long long num_parts,
                                         const Decision& decision) {
  __shared__ double squares[measured_rows];
  const Lanes lanes(lanes_per_row);
  const Parts<const Compute<Storage>> all(run_parts, rows.num_rows, row_width);
  const bool is_refused = *refused != 0;
  const auto table_of = [&](long long position) {
    return tables.count == 1 ? 0 : tables.number_of(__ldg(&rows.keys[position]));
  };
  for (long long part = blockIdx.x; part < num_parts; part += gridDim.x) {
    for (int k = threadIdx.x / lanes_per_row; k < measured_rows;
         k += clip_threads / lanes_per_row) {
      const long long begin = part * measured_rows + k;
      double mine = 0;
      if (begin < rows.num_rows && !(is_refused | !begins_run(rows, begin))) {
        mine = squares_of_run<decides<Decision>>(tables.values_of<Storage>(table_of(begin)), rows,
                                                 all, static_cast<unsigned int>(begin), lanes);
      }
      if (lanes.lane == 0) squares[k] = mine;
    }
    __syncthreads();
    const double mine = squares[threadIdx.x];
    if (decides<Decision> && isnan(mine)) {
      note_bad(decision, table_of(part * measured_rows + threadIdx.x));
    }
    const double sum = sum_of_block<clip_threads>(mine);
    if (threadIdx.x == 0) parts[part] = sum;
  }
}

// Adds the squares of tables' gradients to a norm; see `measure`. `run_parts` are those of
// `sum_pieces`, and `parts` is for a number of each `measured_rows` positions.
template <class Types>
__global__ void __launch_bounds__(clip_threads, 2)
    measure_rows(const __grid_constant__ TableGradient only_gradient,
                 const TableGradient* __restrict__ gradients, long long num_tables,
                 const SortedRows<KeyOf<Types>> rows,
                 const ComputeOf<Types>* __restrict__ run_parts, long long row_width,
                 int lanes_per_row, const unsigned long long* __restrict__ refused, double* parts,
                 const __grid_constant__ ClipTotals totals, const __grid_constant__ ClipRule rule,
                 ClipResult* results, const __grid_constant__ DecisionOf<Types> decision) {
  const long long num_parts = (rows.num_rows + measured_rows - 1) / measured_rows;
  sum_rows<StorageOf<Types>>({only_gradient, gradients, num_tables}, rows, run_parts, row_width,
                             lanes_per_row, refused, parts, num_parts, decision);
  finish_sums(parts, num_parts, totals, rule, results, decision);
}

}  // namespace gpuopt
