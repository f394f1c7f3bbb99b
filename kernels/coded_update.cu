// Applies one rule to every element of many variables whose slots are in 8 bits. Where the rule
// needs sums over each variable, a kernel before it computes them.
#include "shared/coded_blocks.cuh"
#include "shared/variable_sums.cuh"

namespace gpuopt {

template <class Program>
using CodedVariableOf = CodedVariable<num_coded_arrays<Program>>;

// The blocks of a chunk. The lanes that share them have `chunk_size` elements, a few of which are
// not there where blocks are short.
template <class Program>
struct BlocksOfChunk {
  CodedTarget<Program> target;
  const GradientOf<Program>* grad;
  Lanes lanes;
  long long width;
  long long per_row;  // blocks
  long long begin;    // the number of the first block
  long long end;
  bool is_one_row;

  __device__ __forceinline__ BlocksOfChunk(const CodedVariableOf<Program>& variable,
                                           unsigned int number, long long chunk_size,
                                           long long gradient)
      : target(variable.arrays),
        grad(reinterpret_cast<const GradientOf<Program>*>(gradient)),
        lanes(lanes_of_block<Program>(variable.width)),
        width(variable.width),
        per_row(blocks_of_row<Program>(variable.width)),
        is_one_row(variable.width == variable.size) {
    target.first_number = variable.first_number;
    const long long num_blocks = is_one_row ? per_row : variable.size / width * per_row;
    const long long at_once = chunk_size / (lane_codes * lanes.num_lanes);
    begin = number * at_once;
    end = begin + at_once < num_blocks ? begin + at_once : num_blocks;
  }

  // Calls `visit` with the state of a lane's elements, their gradient, where they are, and whether
  // they are packs of the variable and its codes.
  template <class Visit>
  __device__ __forceinline__ void visit(const Visit& visit_part) const {
    const bool has_packs = target.has_packs();
    const bool has_grad_packs = is_pack_aligned(grad);
    const int at_once = static_cast<int>(blockDim.x) / lanes.num_lanes;
    for (long long block = begin + threadIdx.x / lanes.num_lanes; block < end; block += at_once) {
      long long row_begin = 0;
      long long column = block * Program::per_block;
      if (!is_one_row) {
        const long long row = block / per_row;
        row_begin = row * width;
        column -= row * per_row * Program::per_block;
      }
      const LanePart part(Program::per_block, block, row_begin, column, width, lanes);
      const bool is_packed = part.is_packed();
      GradientOf<Program> stored[lane_codes];
      load_lane<Caching::evict_first>(grad + part.begin, part.count, is_packed & has_grad_packs,
                                      stored);
      CodedState<Program> state(target, is_packed & has_packs, part);
      float gradient[lane_codes];
#pragma unroll
      for (int k = 0; k < lane_codes; ++k) gradient[k] = static_cast<float>(stored[k]);
      visit_part(state, gradient, part, is_packed & has_packs);
    }
  }
};

// Calls `visit` with each chunk of this block: its number, the variable's number, and its blocks.
// The arguments are those of `visit_chunks` in dense_update.cu.
template <class Program, class Visit>
__device__ __forceinline__ void visit_coded_chunks(
    const CodedVariableOf<Program>* __restrict__ variables, const Chunk* __restrict__ chunks,
    long long num_chunks, long long chunk_size, const long long* __restrict__ grads,
    const FewGradients& few_grads, const Visit& visit) {
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const long long gradient =
        grads == nullptr ? few_grads.of[chunk.variable] : __ldg(&grads[chunk.variable]);
    visit(c, chunk.variable,
          BlocksOfChunk<Program>(variables[chunk.variable], chunk.number, chunk_size, gradient));
  }
}

// How many blocks of `coded_update` a multiprocessor is to hold: for three, compilers would spill.
constexpr int blocks_of_coded_updates = 2;

// Updates variables; see `dense_update` for the arguments.
template <class Program>
__global__ void __launch_bounds__(dense_threads, blocks_of_coded_updates)
    coded_update(const CodedVariableOf<Program>* __restrict__ variables, long long num_variables,
                 const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
                 const long long* __restrict__ grads,
                 const __grid_constant__ FewGradients few_grads,
                 const long long* __restrict__ groups,
                 const __grid_constant__ GivenOf<Program> scalars,
                 const ScalarsOf<Program>* __restrict__ many_scalars,
                 const unsigned long long* __restrict__ refused) {
  if (*refused != 0) return;
  const GroupScalars<Program> every = {scalars, many_scalars};
  prepare_codes<Program>();
  visit_coded_chunks<Program>(
      variables, chunks, num_chunks, chunk_size, grads, few_grads,
      [&](long long, unsigned int variable, const BlocksOfChunk<Program>& blocks) {
        const ScalarsOf<Program>& given = every.of_variable(variable, groups);
        blocks.visit([&](auto& state, const auto& gradient, const LanePart& part, bool is_packed) {
          state.update(gradient, given);
          state.store_to(blocks.target, is_packed, part, blocks.lanes);
        });
      });
}

// Writes the scalars of each variable, with what the rule sums over it, as `sum_terms` does.
template <class Program>
__global__ void __launch_bounds__(dense_threads) sum_coded_terms(
    const CodedVariableOf<Program>* __restrict__ variables, long long num_variables,
    const Chunk* __restrict__ chunks, long long num_chunks, long long chunk_size,
    const long long* __restrict__ grads, const __grid_constant__ FewGradients few_grads,
    const long long* __restrict__ groups, const __grid_constant__ GivenOf<Program> scalars,
    const ScalarsOf<Program>* __restrict__ many_scalars, const long long* __restrict__ first_chunks,
    double* parts, unsigned int* num_done, int first_sum,
    ScalarsOf<Program>* __restrict__ of_variables, const unsigned long long* __restrict__ refused) {
  if (*refused != 0) return;
  const GroupScalars<Program> every = {scalars, many_scalars};
  const VariableSums<Program> sums = {first_chunks, parts, num_done, first_sum, of_variables};
  prepare_codes<Program>();
  visit_coded_chunks<Program>(
      variables, chunks, num_chunks, chunk_size, grads, few_grads,
      [&](long long chunk, unsigned int variable, const BlocksOfChunk<Program>& blocks) {
        const ScalarsOf<Program>& given = every.of_variable(variable, groups);
        float mine[Program::num_sums] = {};
        blocks.visit([&](const auto& state, const auto& gradient, const LanePart&, bool) {
          state.add_terms(gradient, given, mine);
        });
        sums.finish_chunk(chunk, variable, mine, every, groups);
      });
}

}  // namespace gpuopt
