// Applies one rule to the rows that a sparse gradient names.
#include "shared/grid.cuh"
#include "shared/runs.cuh"

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

template <class Storage, int count>
__device__ __forceinline__ void sum_one_part(const Storage* grad, const unsigned int* positions,
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
__global__ void sum_pieces(const Storage* __restrict__ grad, const SortedRows<Key> rows,
                           long long row_width, Compute<Storage>* parts, int lanes_per_row,
                           const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const Lanes lanes(lanes_per_row);
  const bool packed = row_width % pack_size<Storage> == 0 && is_pack_aligned(grad);
  const long long num_pieces = (rows.num_rows + piece_size - 1) / piece_size;
  for (long long piece = lanes.group; piece < num_pieces; piece += lanes.num_groups) {
    const unsigned int piece_begin = static_cast<unsigned int>(piece * piece_size);
    const unsigned int piece_end = rows.num_rows < piece_begin + piece_size
                                       ? static_cast<unsigned int>(rows.num_rows)
                                       : piece_begin + piece_size;
    // The runs at the piece's first position and at the one after its last: no other can be long.
    const unsigned int first_run = __ldg(&rows.run_of_piece[piece]);
    const unsigned int last_run =
        piece + 1 < num_pieces ? __ldg(&rows.run_of_piece[piece + 1]) : first_run;
    for (unsigned int run = first_run;; run = last_run) {
      const unsigned int run_begin = __ldg(&rows.begins[run]);
      const unsigned int run_end = __ldg(&rows.begins[run + 1]);
      if (is_long(run_begin, run_end) && run_begin < piece_end) {
        const unsigned int begin = run_begin > piece_begin ? run_begin : piece_begin;
        const unsigned int end = run_end < piece_end ? run_end : piece_end;
        Compute<Storage>* part =
            parts + part_number(static_cast<unsigned int>(piece), run_begin) * row_width;
        if (packed) {
          sum_one_part<Storage, pack_size<Storage>>(grad, rows.positions, begin, end, row_width,
                                                    lanes, part);
        } else {
          sum_one_part<Storage, 1>(grad, rows.positions, begin, end, row_width, lanes, part);
        }
      }
      if (run == last_run) break;
    }
  }
}

template <class Storage, int count>
__device__ __forceinline__ void sum_run(const Storage* grad, const unsigned int* positions,
                                        const Compute<Storage>* parts, unsigned int begin,
                                        unsigned int end, long long row_width, long long column,
                                        Compute<Storage> (&sum)[count]) {
  if (is_long(begin, end)) {
    sum_parts(parts, begin, end, row_width, column, sum);
  } else {
    sum_gradients<4>(grad, positions, begin, end, row_width, column, sum);
  }
}

template <class Rule, class Storage, int count>
__device__ __forceinline__ void update_row(const Target<Rule, Storage>& target, long long row,
                                           const Storage* grad, const unsigned int* positions,
                                           const Compute<Storage>* parts, unsigned int begin,
                                           unsigned int end, long long row_width,
                                           const Lanes& lanes,
                                           const Scalars<Rule, Storage>& scalars) {
  for (long long column = lanes.lane * count; column < row_width;
       column += lanes.num_lanes * count) {
    const long long at = row * row_width + column;
    State<Rule, Storage, count> state(target, at);
    Compute<Storage> sum[count];
    sum_run(grad, positions, parts, begin, end, row_width, column, sum);
    state.update(sum, scalars);
    state.store_to(target, at);
  }
}

// Applies the rule to each touched row and the sum of its gradients. `arrays` are the variable and
// its slots. If `touched` is not null, `write_runs` has set bits in it, which are cleared again.
template <class Rule, class Storage, class Key>
__global__ void sparse_update(const __grid_constant__ ArraysOf<Rule> arrays,
                              const Storage* __restrict__ grad, const SortedRows<Key> rows,
                              const Compute<Storage>* __restrict__ parts, long long row_width,
                              const __grid_constant__ Scalars<Rule, Storage> scalars,
                              unsigned int* touched, int lanes_per_row,
                              const unsigned long long* __restrict__ refused) {
  if (*refused) return;
  const Target<Rule, Storage> target(arrays.of, 1);
  const Lanes lanes(lanes_per_row);
  const bool packed =
      row_width % pack_size<Storage> == 0 && target.is_pack_aligned() && is_pack_aligned(grad);
  for (long long run = lanes.group; run < __ldg(rows.num_runs); run += lanes.num_groups) {
    const unsigned int begin = __ldg(&rows.begins[run]);
    const unsigned int end = __ldg(&rows.begins[run + 1]);
    const long long row = static_cast<long long>(__ldg(&rows.keys[begin]));
    if (packed) {
      update_row<Rule, Storage, pack_size<Storage>>(target, row, grad, rows.positions, parts, begin,
                                                    end, row_width, lanes, scalars);
    } else {
      update_row<Rule, Storage, 1>(target, row, grad, rows.positions, parts, begin, end, row_width,
                                   lanes, scalars);
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
  const Target<Rule, Storage> target(arrays.of, 1);
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
  if (*refused) return;
  const Lanes lanes(lanes_per_row);
  for (long long run = lanes.group; run < __ldg(rows.num_runs); run += lanes.num_groups) {
    const unsigned int begin = __ldg(&rows.begins[run]);
    const unsigned int end = __ldg(&rows.begins[run + 1]);
    for (long long column = lanes.lane; column < row_width; column += lanes.num_lanes) {
      Compute<Storage> sum[1];
      sum_run(grad, rows.positions, parts, begin, end, row_width, column, sum);
      sums[run * row_width + column] = sum[0];
    }
  }
}

}  // namespace gpuopt
