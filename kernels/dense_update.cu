// Applies one rule to every element of many variables; sample_program.cuh is a rule. Where the rule
// needs sums over each variable, a kernel before it computes them.
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
template <class Program, class Visit>
__device__ __forceinline__ void visit_first(const Target<Program>& target,
                                            const GradientOf<Program>* grad, int size,
                                            const Visit& visit) {
  constexpr int pack = pack_of<Program>;
  int packs_begin = 0;
  int packs_end = 0;
  if (target.has_common_packs()) {
    const int before = elements_to_pack<Program>(target.var);
    packs_begin = before < size ? before : size;
    packs_end = size - (size - packs_begin) % pack;
  }
  const auto visit_at = [&](auto count, bool is_grad_packed, int at) {
    State<Program, count.value> state(target, at);
    RealOf<Program> gradient[count.value];
    load_gradient(grad, is_grad_packed, at, gradient);
    visit(state, gradient, at);
  };
  const bool is_grad_packed = offset_in_pack<Program>(grad) == offset_in_pack<Program>(target.var);
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
template <class Program, class Visit>
__device__ __forceinline__ void visit_chunks(
    const VariableOf<Program>* __restrict__ variables, long long num_variables,
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
    const VariableOf<Program> entry = variables[variable];
    const long long size = entry.size;
    const long long end = begin + chunk_size < size ? begin + chunk_size : size;
    const GradientOf<Program>* grad = reinterpret_cast<const GradientOf<Program>*>(
        grads == nullptr ? few_grads.of[variable] : __ldg(&grads[variable]));
    Target<Program> target(entry.arrays);
    target.first_number = entry.first_number;
    visit(c, variable, target.from(begin), grad + begin, static_cast<int>(end - begin));
  }
}

// The scalars of variables, with what the rule sums over each: if its program has a `first_sum`,
// `measure_inputs` has computed the sums of gradients as they are, and `sums` holds those of each
// variable, which become the scalars from that number on.
template <class Program>
struct ScalarsOfVariables {
  GroupScalars<Program> every;
  const long long* __restrict__ groups;
  const double* __restrict__ sums;

  __device__ __forceinline__ decltype(auto) operator()(unsigned int variable) const {
    if constexpr (Program::first_sum < 0) {
      return every.of_variable(variable, groups);
    } else {
      ScalarsOf<Program> scalars = every.of_variable(variable, groups);
      const double factor = static_cast<double>(factor_in<Program>(scalars));
      RealOf<Program>* own = reinterpret_cast<RealOf<Program>*>(&scalars) + Program::first_sum;
#pragma unroll
      for (int k = 0; k < Program::num_sums; ++k) {
        double sum = __ldg(&sums[static_cast<long long>(variable) * Program::num_sums + k]);
#pragma unroll
        for (int times = 0; times < Program::degree(k); ++times) sum *= factor;
        own[k] = static_cast<RealOf<Program>>(sum);
      }
      return scalars;
    }
  }
};

// Updates the rows that begin in chunks, by a row-wise rule. `widths` holds how many elements a row
// of each variable has.
template <class Program>
__device__ __forceinline__ void update_rows_of_chunks(
    const VariableOf<Program>* __restrict__ variables, const Chunk* __restrict__ chunks,
    long long num_chunks, long long chunk_size, const long long* __restrict__ grads,
    const FewGradients& few_grads, const ScalarsOfVariables<Program>& scalars_of,
    const long long* __restrict__ widths, const unsigned long long* __restrict__ refused) {
  constexpr int pack = pack_of<Program>;
  if (*refused != 0) return;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const unsigned int variable = chunk.variable;
    const VariableOf<Program> entry = variables[variable];
    const long long width = __ldg(&widths[variable]);
    const long long begin = chunk.number * chunk_size;
    const long long end = begin + chunk_size < entry.size ? begin + chunk_size : entry.size;
    const GradientOf<Program>* grad = reinterpret_cast<const GradientOf<Program>*>(
        grads == nullptr ? few_grads.of[variable] : __ldg(&grads[variable]));
    Target<Program> target(entry.arrays);
    target.first_number = entry.first_number;
    const Lanes lanes(lanes_per_row(width % pack == 0 ? width / pack : width));
    const long long past_last = (end + width - 1) / width;
    for (long long row = (begin + width - 1) / width + threadIdx.x / lanes.num_lanes;
         row < past_last; row += blockDim.x / lanes.num_lanes) {
      const auto gradient_at = [&](long long at, auto& gradient) {
        load_gradient(grad + row * width + at, true, 0, gradient);
      };
      update_whole_row(target, row, width, lanes, begins_pack<Program>(grad), gradient_at,
                       scalars_of(variable));
    }
  }
}

// Whether a rule moves an average of 32 bits in packs of 16 bits. It takes the registers of twice
// as many elements.
template <class Program>
constexpr bool has_wide_average =
    has_average_apart<Program> && sizeof(RealOf<Program>) > widest_of<Program>;

// How many blocks of `dense_update` a multiprocessor is to hold, where compilers would rather spill
// than take the registers that are left. 0 leaves it to them.
template <class Program>
constexpr int blocks_of_updates() {
  constexpr bool are_doubles = sizeof(RealOf<Program>) > 4;
  constexpr bool has_average = Program::num_averages > 0;
  constexpr bool has_more = CompanionOf<Program>::num_arrays > 0;
  // Doubles of four arrays take the registers of one block more.
  if (Program::num_row_slots > 0) return are_doubles && Program::num_slots > 2 ? 2 : 3;
  if (Program::first_sum >= 0 && are_doubles) return 2;
  if (has_counts<GivenOf<Program>>) {
    const bool is_wide = has_average && (sizeof(VarOf<Program>) == 2 || has_more);
    return are_doubles || Program::is_rounded || is_wide ? 2 : 3;
  }
  if (has_groups<Program>) return 0;
  if (has_wide_average<Program>) return 2;
  if (has_average && (are_doubles || has_more)) return 3;
  // Slots that are narrower than a master copy.
  return has_more && sizeof(SlotOf<Program>) < sizeof(VarOf<Program>) ? 4 : 0;
}

// Updates chunks of variables, see `visit_chunks`. `groups` holds the number of each variable's
// group; null if the program has none. `many_scalars` has each group's scalars; if it is null,
// `scalars` has. Of a row-wise rule, a row belongs to the chunk that it begins in, and `widths`
// holds how many elements a row of each variable has.
template <class Program>
__global__ void __launch_bounds__(dense_threads, blocks_of_updates<Program>())
    dense_update(const VariableOf<Program>* __restrict__ variables, long long num_variables,
                 const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
                 const long long* __restrict__ grads,
                 const __grid_constant__ FewGradients few_grads,
                 const long long* __restrict__ groups,
                 const __grid_constant__ GivenOf<Program> scalars,
                 const ScalarsOf<Program>* __restrict__ many_scalars,
                 const long long* __restrict__ widths, const double* __restrict__ sums,
                 const unsigned long long* __restrict__ refused) {
  const ScalarsOfVariables<Program> scalars_of = {{scalars, many_scalars}, groups, sums};
  if constexpr (Program::num_row_slots > 0) {
    update_rows_of_chunks<Program>(variables, chunks, num_chunks, chunk_size, grads, few_grads,
                                   scalars_of, widths, refused);
  } else {
    visit_chunks<Program>(
        variables, num_variables, chunks, num_chunks, chunk_size, grads, few_grads, refused,
        [&](long long, unsigned int variable, const Target<Program>& target,
            const GradientOf<Program>* grad, int size) {
          const ScalarsOf<Program>& given = scalars_of(variable);
          visit_first(target, grad, size, [&](auto& state, const auto& gradient, int at) {
            state.update(gradient, given);
            state.store_to(target, at);
          });
        });
  }
}

// How many blocks of `sum_terms` a multiprocessor is to hold: with an average, compilers would
// rather spill than take more registers than five blocks of floats or four of doubles have, or
// three with the count of steps. 0 leaves it to them.
template <class Program>
constexpr int blocks_of_sums = Program::num_averages == 0     ? 0
                               : has_wide_average<Program>    ? 3
                               : sizeof(RealOf<Program>) <= 4 ? 4
                               : has_counts<GivenOf<Program>> ? 2
                                                              : 3;

// Writes the scalars of each variable that has elements, with what the rule sums over it: see
// `VariableSums`. Nothing is updated. The arguments are those of `dense_update`.
template <class Program>
__global__ void __launch_bounds__(dense_threads, blocks_of_sums<Program>)
    sum_terms(const VariableOf<Program>* __restrict__ variables, long long num_variables,
              const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
              const long long* __restrict__ grads, const __grid_constant__ FewGradients few_grads,
              const long long* __restrict__ groups,
              const __grid_constant__ GivenOf<Program> scalars,
              const ScalarsOf<Program>* __restrict__ many_scalars,
              const long long* __restrict__ first_chunks, double* parts, unsigned int* num_done,
              int first_sum, ScalarsOf<Program>* __restrict__ of_variables,
              const unsigned long long* __restrict__ refused) {
  const GroupScalars<Program> every = {scalars, many_scalars};
  const VariableSums<Program> sums = {first_chunks, parts, num_done, first_sum, of_variables};
  visit_chunks<Program>(
      variables, num_variables, chunks, num_chunks, chunk_size, grads, few_grads, refused,
      [&](long long chunk, unsigned int variable, const Target<Program>& target,
          const GradientOf<Program>* grad, int size) {
        const ScalarsOf<Program> given = every.of_variable(variable, groups);
        RealOf<Program> mine[Program::num_sums] = {};
        visit_first(target, grad, size, [&](const auto& state, const auto& gradient, int) {
          state.add_terms(gradient, given, mine);
        });
        sums.finish_chunk(chunk, variable, mine, every, groups);
      });
}

}  // namespace gpuopt
