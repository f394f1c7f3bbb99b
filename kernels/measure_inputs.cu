// Measures gradients as `measure` does, and what a rule sums over its inputs, the variables and
// these gradients, by the same launch.
#include "shared/clipped_arrays.cuh"
#include "shared/loss_scaling.cuh"
#include "shared/update.cuh"
#include "shared/variable_sums.cuh"

namespace gpuopt {

struct NoSlots : RuleDefaults {
  static constexpr int num_slots = 0;
};

// A program's variables without their slots.
template <class Program>
using VariablesOf = WithTypesOf<NoSlots, Program>;

// Loads what a rule computes with, of a pack of weights from `at` on, those past the end as 0.
template <class Program, int count>
__device__ __forceinline__ void load_weights(const Target<VariablesOf<Program>>& target, int at,
                                             int size, RealOf<Program> (&weights)[count]) {
  constexpr int at_once = pack_of<Program>;
  static_assert(count % at_once == 0, "a pack of the widest type is of the fewest elements");
  const bool is_packed = target.is_pack_aligned() && at + count <= size;
#pragma unroll
  for (int begin = 0; begin < count; begin += at_once) {
    if (is_packed) {
      Weights<Program, at_once> pack;
      pack.load_from(target, at + begin);
#pragma unroll
      for (int k = 0; k < at_once; ++k) weights[begin + k] = pack.get(k);
      continue;
    }
#pragma unroll
    for (int k = begin; k < begin + at_once; ++k) {
      weights[k] = 0;
      if (at + k >= size) continue;
      Weights<Program, 1> one;
      one.load_from(target, at + k);
      weights[k] = one.get(0);
    }
  }
}

// What is summed over a chunk.
template <class Program>
struct InputSums {
  using Real = RealOf<Program>;

  Real squares;                   // of the gradient, as `sum_chunk` in clip.cu adds them up
  Real terms[Program::num_sums];  // of the rule

  // Whether a float holds all sums.
  __device__ __forceinline__ bool are_finite() const {
    bool are = isfinite(squares);
#pragma unroll
    for (int k = 0; k < Program::num_sums; ++k) are &= isfinite(terms[k]);
    return are;
  }
};

// Returns the sums over a chunk, whose gradient is multiplied by `by` before, to all threads of the
// block. What the rule sums is of the gradient within [-bound, bound].
template <class Program, class Decision>
__device__ __forceinline__ InputSums<Program> sum_inputs(
    const ClipChunk<GradientOf<Program>>& chunk, const Target<VariablesOf<Program>>& target,
    RealOf<Program> bound, RealOf<Program> by) {
  using Real = RealOf<Program>;
  using Gradient = GradientOf<Program>;
  constexpr int pack = pack_size<Gradient>;
  constexpr int num_sums = Program::num_sums;
  const ScalarsOf<Program> none = {};  // terms of inputs depend on none
  Real places[pack] = {};
  Real mine[num_sums] = {};
  for (int i = threadIdx.x * pack; i < chunk.size; i += clip_threads * pack) {
    Elements<Gradient, pack> elements;
    chunk.load(i, elements);
    Real weights[pack];
    load_weights<Program>(target, i, chunk.size, weights);
#pragma unroll
    for (int k = 0; k < pack; ++k) {
      const Real given = Real(elements.of[k]), x = given * by;
      const auto counted = decides<Decision> ? nan_unless_finite(x) : x;
      places[k] += counted * counted;
      Real slots[slot_capacity<Program>] = {};
      Real terms[num_sums];
      Program::terms(weights[k], clip(given, bound) * by, slots, none, terms);
#pragma unroll
      for (int sum = 0; sum < num_sums; ++sum)
        mine[sum] += i + k < chunk.size ? terms[sum] : Real(0);
    }
  }
  InputSums<Program> sums;
  sums.squares = sum_of_block<clip_threads>(add_places(places));
#pragma unroll
  for (int k = 0; k < num_sums; ++k) sums.terms[k] = sum_of_block<clip_threads>(mine[k]);
  return sums;
}

// Returns what a sum over a gradient made smaller would be over the gradient itself.
__device__ __forceinline__ double enlarged(double sum, int degree) {
  for (int times = 0; times < degree; ++times) sum /= made_smaller;
  return sum;
}

// Writes the sum of squares of each chunk of the block to `squares`, as `sum_chunks` in clip.cu
// does if sums are wide, and what the rule sums over each variable. Those that floats cannot hold
// are of a gradient made smaller. `parts` is for sums of each chunk, Program::num_sums of them;
// `num_done` has how many chunks of each variable are done: 0 before and after the launch.
// `sums_of` gets the sums of each variable, by its number. Precondition: blocks have `clip_threads`
// threads.
template <class Program, class Decision>
__device__ __forceinline__ void sum_chunks_of_inputs(
    const ClippedArray& only, const ClippedArray* __restrict__ arrays, long long num_arrays,
    long long num_chunks, const MeasuredVariable* __restrict__ variables, double* squares,
    double* parts, unsigned int* num_done, double* __restrict__ sums_of, const ClipRule& rule,
    const Decision& decision) {
  using Real = RealOf<Program>;
  constexpr int num_sums = Program::num_sums;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const long long number = num_arrays == 1 ? 0 : number_of_array(arrays, num_arrays, c);
    const ClippedArray& array = num_arrays == 1 ? only : arrays[number];
    const MeasuredVariable variable = variables[number];
    const ClipChunk<GradientOf<Program>> chunk(array, c);
    const Target<VariablesOf<Program>> target =
        Target<VariablesOf<Program>>(variable.arrays).from(begin_of(array, c));
    const Real bound = Real(scaled(decision, variable.bound, rule));
    const InputSums<Program> sums = sum_inputs<Program, Decision>(chunk, target, bound, Real(1));
    InputSums<Program> smaller = sums;
    if (sizeof(Real) == sizeof(float) && !sums.are_finite()) {
      smaller = sum_inputs<Program, Decision>(chunk, target, bound, Real(made_smaller));
    }
    const double sum_here = isinf(sums.squares) ? enlarged(static_cast<double>(smaller.squares), 2)
                                                : static_cast<double>(sums.squares);
    if (threadIdx.x == 0) {
      squares[c] = sum_here;
      if (decides<Decision> && isnan(sum_here)) note_bad(decision, number);
#pragma unroll
      for (int k = 0; k < num_sums; ++k) {
        // Where a float holds it, it is not of what may have underflowed.
        parts[c * num_sums + k] =
            isfinite(sums.terms[k])
                ? static_cast<double>(sums.terms[k])
                : enlarged(static_cast<double>(smaller.terms[k]), Program::degree(k));
      }
    }
    double of_variable[num_sums];
    const long long end = array.first_chunk + (array.size + clip_chunk - 1) / clip_chunk;
    if (add_up_chunks(parts, array.first_chunk, end, &num_done[number], of_variable) &&
        threadIdx.x == 0) {
#pragma unroll
      for (int k = 0; k < num_sums; ++k) {
        sums_of[variable.number * num_sums + k] = of_variable[k];
      }
    }
  }
  __syncthreads();  // before the launch's last block is looked for
}

// The arguments are those of `measure`, and of `sum_chunks_of_inputs`.
template <class Program>
__global__ void __launch_bounds__(clip_threads, 3)
    measure_inputs(const __grid_constant__ ClippedArray only,
                   const ClippedArray* __restrict__ arrays, long long num_arrays,
                   long long num_chunks, const MeasuredVariable* __restrict__ variables,
                   double* parts_of_sums, unsigned int* num_done, double* sums, double* parts,
                   const __grid_constant__ ClipTotals totals, const __grid_constant__ ClipRule rule,
                   ClipResult* results, const __grid_constant__ DecisionOf<Program> decision) {
  sum_chunks_of_inputs<Program>(only, arrays, num_arrays, num_chunks, variables, parts,
                                parts_of_sums, num_done, sums, rule, decision);
  finish_sums(parts, num_chunks, totals, rule, results, decision);
}

}  // namespace gpuopt
