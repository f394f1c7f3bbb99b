// Applies one rule to every element of many variables; sample_program.cuh is a rule. Where the rule
// needs sums over each variable, a kernel before it computes them.
#include "shared/chunks.cuh"
#include "shared/row_update.cuh"
#include "shared/update.cuh"
#include "shared/variable_sums.cuh"

namespace gpuopt {

// Says how many elements a function is called for: one, or a pack.
template <int number>
struct Count {
  static constexpr int value = number;
};

// Loads the gradient of `count` elements from `at` on: one by one if they are not at the address of
// a pack, beside the packs of the variable and its slots.
template <int count, class Gradient>
__device__ __forceinline__ void load_gradient(const Gradient* grad, bool is_grad_packed, int at,
                                              Compute<Gradient> (&gradient)[count]) {
  Elements<Gradient, count> stored;
  if (is_grad_packed) {
    load<Caching::evict_first>(grad + at, stored);
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      Elements<Gradient, 1> one;
      load<Caching::evict_first>(grad + at + k, one);
      stored.of[k] = one.of[0];
    }
  }
#pragma unroll
  for (int k = 0; k < count; ++k) gradient[k] = Compute<Gradient>(stored.of[k]);
}

// Calls `visit` with the state and the gradient of the first `size` elements, and where they are:
// in packs from where packs of the variable and its slots begin, if they begin at the same
// elements, and the others one by one.
template <class Rule, class Storage, class Visit>
__device__ __forceinline__ void visit_first(const Target<Rule, Storage>& target,
                                            const StoredGradient<Storage>* grad, int size,
                                            const Visit& visit) {
  constexpr int pack = pack_size<Storage>;
  int packs_begin = 0;
  int packs_end = 0;
  if (target.has_common_packs()) {
    const int before = elements_to_pack<Storage>(target.var);
    packs_begin = before < size ? before : size;
    packs_end = size - (size - packs_begin) % pack;
  }
  const auto visit_at = [&](auto count, bool is_grad_packed, int at) {
    State<Rule, Storage, count.value> state(target, at);
    Compute<Storage> gradient[count.value];
    load_gradient(grad, is_grad_packed, at, gradient);
    visit(state, gradient, at);
  };
  const bool is_grad_packed = offset_in_pack<Storage>(grad) == offset_in_pack<Storage>(target.var);
  for (int i = packs_begin + threadIdx.x * pack; i < packs_end; i += blockDim.x * pack) {
    visit_at(Count<pack>(), is_grad_packed, i);
  }
  const int others = size - (packs_end - packs_begin);
  for (int i = threadIdx.x; i < others; i += blockDim.x) {
    const int at = i < packs_begin ? i : packs_end - packs_begin + i;
    visit_at(Count<1>(), true, at);
  }
}

// Calls `visit` with each chunk of this block: its number, the variable's number, the arrays from
// its first element on, the gradient, and its size. Chunks have `chunk_size` elements: a multiple
// of a pack, of 32 bits. A variable's last one may have less. `grads` holds the address of each
// variable's gradient; if it is null, `few_grads` does. Preconditions: no two variables share
// memory; there are no more blocks than chunks.
template <class Rule, class Storage, class Visit>
__device__ __forceinline__ void visit_chunks(
    const VariableOf<Rule, Storage>* __restrict__ variables, long long num_variables,
    const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
    const long long* __restrict__ grads, const FewGradients& few_grads,
    const unsigned long long* __restrict__ refused, const Visit& visit) {
  const unsigned long long is_refused = *refused;
  Chunk chunk = chunks[blockIdx.x];
  // The chunk is always there; that it is asked for makes its load go beside that of `refused`.
  if ((is_refused != 0) | (chunk.variable >= num_variables)) return;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const unsigned int variable = chunk.variable;
    const long long begin = chunk.number * chunk_size;
    chunk = chunks[c + gridDim.x < num_chunks ? c + gridDim.x : c];
    // A copy, so that all loads are in flight before one is waited for.
    const VariableOf<Rule, Storage> entry = variables[variable];
    const long long size = entry.size;
    const long long end = begin + chunk_size < size ? begin + chunk_size : size;
    const StoredGradient<Storage>* grad = reinterpret_cast<const StoredGradient<Storage>*>(
        grads == nullptr ? few_grads.of[variable] : __ldg(&grads[variable]));
    const Target<Rule, Storage> target(entry.arrays);
    visit(c, variable, target.from(begin), grad + begin, static_cast<int>(end - begin));
  }
}

// Updates chunks, see `visit_chunks`. `scalars_of` returns the scalars for a variable's number.
template <class Rule, class Storage, class ScalarsOf>
__device__ __forceinline__ void update_chunks(
    const VariableOf<Rule, Storage>* __restrict__ variables, long long num_variables,
    const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
    const long long* __restrict__ grads, const FewGradients& few_grads, const ScalarsOf& scalars_of,
    const unsigned long long* __restrict__ refused) {
  visit_chunks<Rule, Storage>(
      variables, num_variables, chunks, num_chunks, chunk_size, grads, few_grads, refused,
      [&](long long, unsigned int variable, const Target<Rule, Storage>& target,
          const StoredGradient<Storage>* grad, int size) {
        const Scalars<Rule, Storage>& scalars = scalars_of(variable);
        visit_first(target, grad, size, [&](auto& state, const auto& gradient, int at) {
          state.update(gradient, scalars);
          state.store_to(target, at);
        });
      });
}

// Gives every variable the same scalars. No lambda: NVRTC 12.0 has one return a local variable.
template <class Rule, class Storage>
struct SameScalars {
  const Scalars<Rule, Storage>& scalars;

  __device__ __forceinline__ const Scalars<Rule, Storage>& operator()(unsigned int) const {
    return scalars;
  }
};

// Whether a rule moves an average of 32 bits in packs of 16 bits. It takes the registers of twice
// as many elements.
template <class Rule, class Storage>
constexpr bool has_wide_average =
    has_average_apart<Rule, Storage> && sizeof(Compute<Storage>) > Stored<Storage>::widest;

// How many blocks of `dense_update` a multiprocessor is to hold, where compilers would rather spill
// than take the registers that are left: with an average, doubles and master copies take more than
// four blocks have, and slots that are narrower than a master copy more than five. 0 leaves it to
// them.
template <class Rule, class Storage>
constexpr int blocks_of_updates = has_wide_average<Rule, Storage> ? 2
                                  : (Rule::num_averages > 0) &&
                                          (sizeof(Compute<Storage>) > 4 ||
                                           StoredBeside<Storage>::num_arrays > 0)
                                      ? 3
                                  : StoredBeside<Storage>::num_arrays > 0 &&
                                          sizeof(StoredSlot<Storage>) < sizeof(StoredVar<Storage>)
                                      ? 4
                                      : 0;

// Updates variables of one group.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads, blocks_of_updates<Rule, Storage>)
    dense_update(const VariableOf<Rule, Storage>* __restrict__ variables, long long num_variables,
                 const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
                 const long long* __restrict__ grads,
                 const __grid_constant__ FewGradients few_grads,
                 const __grid_constant__ Scalars<Rule, Storage> scalars,
                 const unsigned long long* __restrict__ refused) {
  update_chunks<Rule, Storage>(variables, num_variables, chunks, num_chunks, chunk_size, grads,
                               few_grads, SameScalars<Rule, Storage>{scalars}, refused);
}

// How many blocks of `dense_update_of_groups` a multiprocessor is to hold: with the count of steps,
// compilers would rather spill than take more registers than four blocks have, and with random bits
// besides, or an average of what is stored in 16 bits, three. 0 leaves it to them.
template <class Rule, class Storage>
constexpr int blocks_of_groups =
    !Rule::is_scaled ? 0
    : sizeof(Compute<Storage>) > 4 || Rule::is_rounded ||
            ((Rule::num_averages > 0) &&
             (sizeof(StoredVar<Storage>) == 2 || StoredBeside<Storage>::num_arrays > 0))
        ? 2
        : 3;

// Updates variables of several groups. `many_scalars` has each group's scalars; if it is null,
// `few_scalars` has.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads, blocks_of_groups<Rule, Storage>)
    dense_update_of_groups(const VariableOf<Rule, Storage>* __restrict__ variables,
                           long long num_variables, const Chunk* __restrict__ chunks,
                           long long num_chunks, long long chunk_size,
                           const long long* __restrict__ grads,
                           const __grid_constant__ FewGradients few_grads,
                           const long long* __restrict__ groups,
                           const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
                           const Scalars<Rule, Storage>* __restrict__ many_scalars,
                           const unsigned long long* __restrict__ refused) {
  const auto scalars_of = [&](unsigned int variable) -> Scalars<Rule, Storage> {
    return scalars_of_group<Rule, Storage>(variable, groups, few_scalars, many_scalars);
  };
  update_chunks<Rule, Storage>(variables, num_variables, chunks, num_chunks, chunk_size, grads,
                               few_grads, scalars_of, refused);
}

// How many blocks of `dense_update_by_sums` a multiprocessor is to hold: as of groups, but with
// doubles, compilers would rather spill than take more registers than three blocks have.
template <class Rule, class Storage>
constexpr int blocks_by_sums = sizeof(Compute<Storage>) > 4 ? 2 : blocks_of_groups<Rule, Storage>;

// Updates variables of several groups by a clipped rule, whose sums `measure_inputs` has computed
// of gradients as they are: `sums` holds those of each variable, which become the scalars from
// number `first_sum` on.
template <class Rule, class Storage, int first_sum>
__global__ void __launch_bounds__(dense_threads, blocks_by_sums<Rule, Storage>)
    dense_update_by_sums(const VariableOf<Rule, Storage>* __restrict__ variables,
                         long long num_variables, const Chunk* __restrict__ chunks,
                         long long num_chunks, long long chunk_size,
                         const long long* __restrict__ grads,
                         const __grid_constant__ FewGradients few_grads,
                         const long long* __restrict__ groups,
                         const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
                         const Scalars<Rule, Storage>* __restrict__ many_scalars,
                         const double* __restrict__ sums,
                         const unsigned long long* __restrict__ refused) {
  const auto scalars_of = [&](unsigned int variable) {
    Scalars<Rule, Storage> scalars =
        scalars_of_group<Rule, Storage>(variable, groups, few_scalars, many_scalars);
    const double factor = static_cast<double>(scalars.clip_factor);
    Compute<Storage>* own = reinterpret_cast<Compute<Storage>*>(&scalars) + first_sum;
#pragma unroll
    for (int k = 0; k < Rule::num_sums; ++k) {
      double sum = __ldg(&sums[static_cast<long long>(variable) * Rule::num_sums + k]);
#pragma unroll
      for (int times = 0; times < Rule::degree(k); ++times) sum *= factor;
      own[k] = static_cast<Compute<Storage>>(sum);
    }
    return scalars;
  };
  update_chunks<Rule, Storage>(variables, num_variables, chunks, num_chunks, chunk_size, grads,
                               few_grads, scalars_of, refused);
}

// Blocks of a row-wise update that run side by side: doubles of four arrays take the registers of
// one block more.
template <class Rule, class Storage>
constexpr int blocks_of_rows = sizeof(Compute<Storage>) > 4 && Rule::num_slots > 2 ? 2 : 3;

// Updates variables of several groups, as `dense_update_of_groups` does, by a row-wise rule.
// `widths` holds how many elements a row of each variable has. A row belongs to the chunk that it
// begins in.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads, blocks_of_rows<Rule, Storage>)
    dense_update_of_rows(const VariableOf<Rule, Storage>* __restrict__ variables,
                         long long num_variables, const Chunk* __restrict__ chunks,
                         long long num_chunks, long long chunk_size,
                         const long long* __restrict__ grads,
                         const __grid_constant__ FewGradients few_grads,
                         const long long* __restrict__ groups, const long long* __restrict__ widths,
                         const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
                         const Scalars<Rule, Storage>* __restrict__ many_scalars,
                         const unsigned long long* __restrict__ refused) {
  constexpr int pack = pack_size<Storage>;
  if (*refused != 0) return;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const unsigned int variable = chunk.variable;
    const VariableOf<Rule, Storage> entry = variables[variable];
    const long long width = __ldg(&widths[variable]);
    const long long begin = chunk.number * chunk_size;
    const long long end = begin + chunk_size < entry.size ? begin + chunk_size : entry.size;
    const StoredGradient<Storage>* grad = reinterpret_cast<const StoredGradient<Storage>*>(
        grads == nullptr ? few_grads.of[variable] : __ldg(&grads[variable]));
    const Target<Rule, Storage> target(entry.arrays);
    const Lanes lanes(lanes_per_row(width % pack == 0 ? width / pack : width));
    const long long past_last = (end + width - 1) / width;
    for (long long row = (begin + width - 1) / width + threadIdx.x / lanes.num_lanes;
         row < past_last; row += blockDim.x / lanes.num_lanes) {
      const auto gradient_at = [&](long long at, auto& gradient) {
        load_gradient(grad + row * width + at, true, 0, gradient);
      };
      update_whole_row(
          target, row, width, lanes, begins_pack<Storage>(grad), gradient_at,
          scalars_of_group<Rule, Storage>(variable, groups, few_scalars, many_scalars));
    }
  }
}

// How many blocks of `sum_terms` a multiprocessor is to hold: with an average, compilers would
// rather spill than take more registers than five blocks of floats or four of doubles have, or
// three with the count of steps. 0 leaves it to them.
template <class Rule, class Storage>
constexpr int blocks_of_sums = Rule::num_averages == 0           ? 0
                               : has_wide_average<Rule, Storage> ? 3
                               : sizeof(Compute<Storage>) <= 4   ? 4
                               : Rule::is_scaled                 ? 2
                                                                 : 3;

// Writes the scalars of each variable that has elements, with what the rule sums over it: see
// `VariableSums`. Nothing is updated.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads, blocks_of_sums<Rule, Storage>)
    sum_terms(const VariableOf<Rule, Storage>* __restrict__ variables, long long num_variables,
              const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
              const long long* __restrict__ grads, const __grid_constant__ FewGradients few_grads,
              const long long* __restrict__ groups,
              const __grid_constant__ FewScalarsOf<Rule, Storage> few_scalars,
              const Scalars<Rule, Storage>* __restrict__ many_scalars,
              const long long* __restrict__ first_chunks, double* parts, unsigned int* num_done,
              int first_sum, Scalars<Rule, Storage>* __restrict__ of_variables,
              const unsigned long long* __restrict__ refused) {
  const VariableSums<Rule, Storage> sums = {first_chunks, parts, num_done, first_sum, of_variables};
  visit_chunks<Rule, Storage>(
      variables, num_variables, chunks, num_chunks, chunk_size, grads, few_grads, refused,
      [&](long long chunk, unsigned int variable, const Target<Rule, Storage>& target,
          const StoredGradient<Storage>* grad, int size) {
        const Scalars<Rule, Storage> scalars =
            scalars_of_group<Rule, Storage>(variable, groups, few_scalars, many_scalars);
        Compute<Storage> mine[Rule::num_sums] = {};
        visit_first(target, grad, size, [&](const auto& state, const auto& gradient, int) {
          state.add_terms(gradient, scalars, mine);
        });
        sums.finish_chunk(chunk, variable, mine, groups, few_scalars, many_scalars);
      });
}

}  // namespace gpuopt
