// Applies one rule to every element of many variables. Where the rule needs sums over each
// variable, two kernels before it compute them.
#include "shared/block_sum.cuh"
#include "shared/update.cuh"

namespace gpuopt {

constexpr int dense_threads = 256;

// Rows of the table, which has a column for each variable. The others are addresses of slots, and
// then, if there are several groups, the number of the variable's.
constexpr int size_row = 0;
constexpr int var_row = 1;
template <class Rule>
constexpr int group_row = var_row + 1 + Rule::num_slots;

// How many gradients' addresses are passed by value: then a step uploads nothing.
constexpr int few_gradients = 5;
struct FewGradients {
  long long of[few_gradients];
};

// Elements of one variable that a block updates in one go. Mirrors `Chunk` in
// gpuopt/backends/cuda/structs.py.
struct alignas(8) Chunk {
  unsigned int variable;  // the number of the variable's column
  unsigned int number;    // among the chunks of the variable
};

// Says how many elements a function is called for: one, or a pack.
template <int number>
struct Count {
  static constexpr int value = number;
};

// Loads the gradient of `count` elements from `at` on: one by one if they are not at the address of
// a pack, beside the packs of the variable and its slots.
template <int count, class Storage>
__device__ __forceinline__ void load_gradient(const Storage* grad, bool is_grad_packed, int at,
                                              Compute<Storage> (&gradient)[count]) {
  Elements<Storage, count> stored;
  if (is_grad_packed) {
    load<Caching::evict_first>(grad + at, stored);
  } else {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      Elements<Storage, 1> one;
      load<Caching::evict_first>(grad + at + k, one);
      stored.of[k] = one.of[0];
    }
  }
#pragma unroll
  for (int k = 0; k < count; ++k) gradient[k] = Compute<Storage>(stored.of[k]);
}

// Calls `visit` with the state and the gradient of the first `size` elements, and where they are:
// in packs from where packs of the variable and its slots begin, if they begin at the same
// elements, and the others one by one.
template <class Rule, class Storage, class Visit>
__device__ __forceinline__ void visit_first(const Target<Rule, Storage>& target,
                                            const Storage* grad, int size, const Visit& visit) {
  constexpr int pack = pack_size<Storage>;
  int packs_begin = 0;
  int packs_end = 0;
  if (target.has_common_packs()) {
    packs_begin = elements_to_pack(target.var) < size ? elements_to_pack(target.var) : size;
    packs_end = size - (size - packs_begin) % pack;
  }
  const auto visit_at = [&](auto count, bool is_grad_packed, int at) {
    State<Rule, Storage, count.value> state(target, at);
    Compute<Storage> gradient[count.value];
    load_gradient(grad, is_grad_packed, at, gradient);
    visit(state, gradient, at);
  };
  const bool is_grad_packed = pack_offset(grad) == pack_offset(target.var);
  for (int i = packs_begin + threadIdx.x * pack; i < packs_end; i += blockDim.x * pack) {
    visit_at(Count<pack>(), is_grad_packed, i);
  }
  const int others = size - (packs_end - packs_begin);
  for (int i = threadIdx.x; i < others; i += blockDim.x) {
    const int at = i < packs_begin ? i : packs_end - packs_begin + i;
    visit_at(Count<1>(), true, at);
  }
}

// Calls `visit` with each chunk of this block: its number, the variable's column of the table, the
// arrays from its first element on, the gradient, and its size. Chunks have `chunk_size` elements:
// a multiple of a pack, of 32 bits. A variable's last one may have less. `grads` holds the address
// of each variable's gradient; if it is null, `few_grads` does. Preconditions: no two variables
// share memory; there are no more blocks than chunks.
template <class Rule, class Storage, class Visit>
__device__ __forceinline__ void visit_chunks(
    const long long* __restrict__ table, long long num_variables, const Chunk* __restrict__ chunks,
    long long num_chunks, long long chunk_size, const long long* __restrict__ grads,
    const FewGradients& few_grads, const unsigned long long* __restrict__ refused,
    const Visit& visit) {
  const unsigned long long is_refused = *refused;
  Chunk chunk = chunks[blockIdx.x];
  // The chunk is always there; that it is asked for makes its load go beside that of `refused`.
  if ((is_refused != 0) | (chunk.variable >= num_variables)) return;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const unsigned int variable = chunk.variable;
    const long long* column = table + variable;
    const long long begin = chunk.number * chunk_size;
    chunk = chunks[c + gridDim.x < num_chunks ? c + gridDim.x : c];
    const long long size = column[size_row * num_variables];
    const long long end = begin + chunk_size < size ? begin + chunk_size : size;
    const Storage* grad = reinterpret_cast<const Storage*>(
        grads == nullptr ? few_grads.of[variable] : __ldg(&grads[variable]));
    const Target<Rule, Storage> target(column + var_row * num_variables, num_variables);
    visit(c, column, target.from(begin), grad + begin, static_cast<int>(end - begin));
  }
}

// Updates chunks, see `visit_chunks`. `scalars_of` returns the scalars for a variable's column of
// the table.
template <class Rule, class Storage, class ScalarsOf>
__device__ __forceinline__ void update_chunks(
    const long long* __restrict__ table, long long num_variables, const Chunk* __restrict__ chunks,
    long long num_chunks, long long chunk_size, const long long* __restrict__ grads,
    const FewGradients& few_grads, const ScalarsOf& scalars_of,
    const unsigned long long* __restrict__ refused) {
  visit_chunks<Rule, Storage>(
      table, num_variables, chunks, num_chunks, chunk_size, grads, few_grads, refused,
      [&](long long, const long long* column, const Target<Rule, Storage>& target,
          const Storage* grad, int size) {
        const Scalars<Rule, Storage>& scalars = scalars_of(column);
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

  __device__ __forceinline__ const Scalars<Rule, Storage>& operator()(const long long*) const {
    return scalars;
  }
};

// Updates variables of one group.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads)
    dense_update(const long long* __restrict__ table, long long num_variables,
                 const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
                 const long long* __restrict__ grads,
                 const __grid_constant__ FewGradients few_grads,
                 const __grid_constant__ Scalars<Rule, Storage> scalars,
                 const unsigned long long* __restrict__ refused) {
  update_chunks<Rule, Storage>(table, num_variables, chunks, num_chunks, chunk_size, grads,
                               few_grads, SameScalars<Rule, Storage>{scalars}, refused);
}

// Returns the scalars of the group of a variable, given its column of the table.
template <class Rule, class Storage>
__device__ __forceinline__ Scalars<Rule, Storage> scalars_of_group(
    const long long* column, long long num_variables, const FewScalars<Rule, Storage>& few_scalars,
    const Scalars<Rule, Storage>* many_scalars) {
  const long long group = __ldg(&column[group_row<Rule> * num_variables]);
  return many_scalars == nullptr ? few_scalars.of[group] : many_scalars[group];
}

// Updates variables of several groups. `many_scalars` has each group's scalars; if it is null,
// `few_scalars` has.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads)
    dense_update_of_groups(const long long* __restrict__ table, long long num_variables,
                           const Chunk* __restrict__ chunks, long long num_chunks,
                           long long chunk_size, const long long* __restrict__ grads,
                           const __grid_constant__ FewGradients few_grads,
                           const __grid_constant__ FewScalars<Rule, Storage> few_scalars,
                           const Scalars<Rule, Storage>* __restrict__ many_scalars,
                           const unsigned long long* __restrict__ refused) {
  const auto scalars_of = [&](const long long* column) -> Scalars<Rule, Storage> {
    return scalars_of_group<Rule, Storage>(column, num_variables, few_scalars, many_scalars);
  };
  update_chunks<Rule, Storage>(table, num_variables, chunks, num_chunks, chunk_size, grads,
                               few_grads, scalars_of, refused);
}

// Writes the sums over each chunk of what the rule sums over a variable: Rule::num_sums for each
// chunk. Nothing is updated. The scalars are those of `dense_update_of_groups`.
// Precondition: the block's threads are a power of 2.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads)
    sum_terms(const long long* __restrict__ table, long long num_variables,
              const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
              const long long* __restrict__ grads, const __grid_constant__ FewGradients few_grads,
              const __grid_constant__ FewScalars<Rule, Storage> few_scalars,
              const Scalars<Rule, Storage>* __restrict__ many_scalars, double* __restrict__ parts,
              const unsigned long long* __restrict__ refused) {
  constexpr int num_sums = Rule::num_sums;
  visit_chunks<Rule, Storage>(
      table, num_variables, chunks, num_chunks, chunk_size, grads, few_grads, refused,
      [&](long long chunk, const long long* column, const Target<Rule, Storage>& target,
          const Storage* grad, int size) {
        const Scalars<Rule, Storage> scalars =
            scalars_of_group<Rule, Storage>(column, num_variables, few_scalars, many_scalars);
        Compute<Storage> mine[num_sums] = {};
        visit_first(target, grad, size, [&](const auto& state, const auto& gradient, int) {
          state.add_terms(gradient, scalars, mine);
        });
#pragma unroll
        for (int k = 0; k < num_sums; ++k) {
          const Compute<Storage> sum = sum_of_block<dense_threads>(mine[k]);
          if (threadIdx.x == 0) parts[chunk * num_sums + k] = static_cast<double>(sum);
        }
      });
}

// Adds up the sums over the chunks of each variable, and writes the variable's scalars: those of
// its group, and the sums from number `first_sum` on. `first_chunks` holds the number of each
// variable's first chunk, and at the end the number of all chunks. Precondition: the block's
// threads are a power of 2.
template <class Rule, class Storage>
__global__ void __launch_bounds__(dense_threads)
    add_sums(const long long* __restrict__ table, long long num_variables,
             const long long* __restrict__ first_chunks, const double* __restrict__ parts,
             int first_sum, const __grid_constant__ FewScalars<Rule, Storage> few_scalars,
             const Scalars<Rule, Storage>* __restrict__ many_scalars,
             Scalars<Rule, Storage>* __restrict__ of_variables) {
  constexpr int num_sums = Rule::num_sums;
  for (long long variable = blockIdx.x; variable < num_variables; variable += gridDim.x) {
    double mine[num_sums] = {};
    const long long end = first_chunks[variable + 1];
    for (long long c = first_chunks[variable] + threadIdx.x; c < end; c += blockDim.x) {
#pragma unroll
      for (int k = 0; k < num_sums; ++k) mine[k] += parts[c * num_sums + k];
    }
    if (threadIdx.x == 0) {
      of_variables[variable] = scalars_of_group<Rule, Storage>(table + variable, num_variables,
                                                               few_scalars, many_scalars);
    }
    Compute<Storage>* sums = reinterpret_cast<Compute<Storage>*>(of_variables + variable);
#pragma unroll
    for (int k = 0; k < num_sums; ++k) {
      const double sum = sum_of_block<dense_threads>(mine[k]);
      if (threadIdx.x == 0) sums[first_sum + k] = static_cast<Compute<Storage>>(sum);
    }
  }
}

}  // namespace gpuopt
