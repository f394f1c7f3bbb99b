// The norm of many arrays, and new arrays that are scaled by it.
#include "shared/clipped_arrays.cuh"
#include "shared/grid.cuh"
#include "shared/loss_scaling.cuh"
#include "shared/norms.cuh"

namespace gpuopt {

// Returns the sum of squares of a chunk's elements, which are multiplied by `by` before, to all
// threads of the block.
template <class Decision, class Storage, class Real = Compute<Storage>>
__device__ __forceinline__ Real sum_chunk(const ClipChunk<Storage>& chunk, Real by) {
  constexpr int pack = pack_size<Storage>;
  Real places[pack] = {};
  for (int i = threadIdx.x * pack; i < chunk.size; i += clip_threads * pack) {
    Elements<Storage, pack> elements;
    chunk.load(i, elements);
#pragma unroll
    for (int k = 0; k < pack; ++k) {
      const Real x = Real(elements.of[k]) * by;
      const auto counted = decides<Decision> ? nan_unless_finite(x) : x;
      places[k] += counted * counted;
    }
  }
  return sum_of_block<clip_threads>(add_places(places));
}

// Writes the sum of squares of each chunk of the block. A single array is passed by value, as
// `only`; `arrays` are read if there are more. If sums are wide, those that floats cannot hold are
// of numbers made smaller. With a decision, the sum is NaN where an element is not finite, and
// there alone. Precondition: blocks have `clip_threads` threads.
template <class Storage, bool are_wide, class Decision>
__device__ __forceinline__ void sum_chunks(const ClippedArray& only,
                                           const ClippedArray* __restrict__ arrays,
                                           long long num_arrays, long long num_chunks, double* sums,
                                           const Decision& decision) {
  using Real = Compute<Storage>;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const ClipChunk<Storage> chunk(array_of(only, arrays, num_arrays, c), c);
    const Real sum_here = sum_chunk<Decision>(chunk, Real(1));
    double sum = static_cast<double>(sum_here);
    if (are_wide && sizeof(Real) == sizeof(float) && isinf(sum_here)) {
      sum = static_cast<double>(sum_chunk<Decision>(chunk, Real(made_smaller)));
      sum /= made_smaller * made_smaller;
    }
    if (threadIdx.x == 0) {
      sums[c] = sum;
      if (decides<Decision> && isnan(sum)) {
        note_bad(decision, num_arrays == 1 ? 0 : number_of_array(arrays, num_arrays, c));
      }
    }
  }
}

template <class Storage>
__global__ void __launch_bounds__(clip_threads)
    sum_squares(const __grid_constant__ ClippedArray only, const ClippedArray* __restrict__ arrays,
                long long num_arrays, long long num_chunks, double* __restrict__ sums) {
  sum_chunks<Storage, false>(only, arrays, num_arrays, num_chunks, sums, NoDecision());
}

// Adds the squares of gradients to a norm. The last launch of a step also makes results, and
// decides about it: `results` is null before. `parts` is for a number of each chunk.
template <class Types>
__global__ void __launch_bounds__(clip_threads, 2)
    measure(const __grid_constant__ ClippedArray only, const ClippedArray* __restrict__ arrays,
            long long num_arrays, long long num_chunks, double* parts,
            const __grid_constant__ ClipTotals totals, const __grid_constant__ ClipRule rule,
            ClipResult* results, const __grid_constant__ DecisionOf<Types> decision) {
  sum_chunks<StorageOf<Types>, true>(only, arrays, num_arrays, num_chunks, parts, decision);
  finish_sums(parts, num_chunks, totals, rule, results, decision);
}

// The sums of several devices, each brought to this one. `many` holds their addresses; if it is
// null, `few` does.
struct JoinedSums {
  const FewSums& few;
  const long long* many;
  long long num_devices;

  __device__ __forceinline__ double of(long long device, long long number) const {
    const long long address = many == nullptr ? few.of[device] : many[device];
    return reinterpret_cast<const double*>(address)[number];
  }

  // What the sums of all devices make of a norm: they are added up in the order of the devices.
  __device__ __forceinline__ ClipResult result(long long norm, const ClipRule& rule) const {
    double sum = 0;
    for (long long device = 0; device < num_devices; ++device) sum += of(device, norm);
    return result_of(rule, sum, norm);
  }

  __device__ __forceinline__ void write(long long num_norms, const ClipRule& rule,
                                        ClipResult* __restrict__ results) const {
    for (long long norm = first_item(); norm < num_norms; norm += items_per_pass()) {
      results[norm] = result(norm, rule);
    }
  }
};

// Makes results of the sums of several devices, [num_norms] of each. With a decision, what is wrong
// comes behind them, and it decides about the step of all devices.
template <class Decision>
__global__ void __launch_bounds__(clip_threads)
    join_sums(const __grid_constant__ FewSums few_sums, const long long* __restrict__ many_sums,
              long long num_devices, long long num_norms, const __grid_constant__ ClipRule rule,
              ClipResult* __restrict__ results, const __grid_constant__ Decision decision) {
  const JoinedSums sums{few_sums, many_sums, num_devices};
  const ClipRule& by = unscaling(decision, rule);
  sums.write(num_norms, by, results);
  if (!decides<Decision> || first_item() != 0) return;
  double wrong = nothing_is_wrong;
  for (long long device = 0; device < num_devices; ++device) {
    wrong = lesser(wrong, sums.of(device, num_norms));
  }
  bool is_unusable = false;
  for (long long norm = 0; norm < num_norms; ++norm) {  // other blocks may have written results
    is_unusable |= isnan(sums.result(norm, by).factor_of_doubles);
  }
  decide(decision, &wrong, is_unusable);
}

// Adds up sums of squares; writes the sum, or its root. Precondition: one block of `clip_threads`
// threads.
template <class Real>
__global__ void __launch_bounds__(clip_threads)
    add_squares(const double* __restrict__ sums, long long num_sums, int is_root,
                Real* __restrict__ result) {
  double mine = 0;
  for (long long i = threadIdx.x; i < num_sums; i += clip_threads) mine += sums[i];
  // As much as TensorFlow's sum can hold: beyond it, a norm is infinite.
  const Real sum = static_cast<Real>(sum_of_block<clip_threads>(mine));
  if (threadIdx.x == 0) *result = is_root ? square_root(sum) : sum;
}

// Scales `count` elements from `at` on: one, or a pack.
template <int count, class Storage>
__device__ __forceinline__ void scale_at(const ClipChunk<Storage>& chunk, int at,
                                         Compute<Storage> first, Compute<Storage> second) {
  using Real = Compute<Storage>;
  Elements<Storage, count> elements;
  load<Caching::normal>(chunk.source + at, elements);
#pragma unroll
  for (int k = 0; k < count; ++k) {
    elements.of[k] = Storage(Real(elements.of[k]) * first * second);
  }
  using Bits = typename BitsOf<sizeof elements>::type;
  Bits bits;
  memcpy(&bits, &elements, sizeof bits);
  // A store to the L2 cache, as all are; the compiler would cut up an ordinary one of a pack.
  __stcg(reinterpret_cast<Bits*>(chunk.target + at), bits);
}

// Writes new arrays: elements are multiplied by one factor and then by another, where the first may
// overflow as TensorFlow's does. The arguments are as in `sum_squares`; `norm` is one number.
template <class Storage>
__global__ void __launch_bounds__(clip_threads)
    scale_to_norm(const __grid_constant__ ClippedArray only,
                  const ClippedArray* __restrict__ arrays, long long num_arrays,
                  long long num_chunks, const Compute<Storage>* __restrict__ norm,
                  Compute<Storage> most, int formula) {
  using Real = Compute<Storage>;
  constexpr int pack = pack_size<Storage>;
  const Real measured = *norm;
  const Real limit = Real(1) / most;
  Real first = most;
  Real second = Real(1) / (formula == clip_by_norm ? greater(measured, most) : measured);
  // Finite norms are less: nothing is scaled, and nothing overflows on the way.
  const bool is_unreached = most > largest_most<Real>;
  if (formula == clip_by_global_norm) {
    first = Real(1);
    second = (is_unreached ? first : most * lesser(second, limit)) + (measured - measured);
  } else if (is_unreached) {
    first = Real(1);
    second = lesser(first, most / measured);
  }
  const bool is_averaged = formula == clip_by_average_norm && !is_unreached;
  for (long long c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const ClippedArray& array = array_of(only, arrays, num_arrays, c);
    const Real factor = is_averaged ? lesser(second * Real(array.size), limit) : second;
    const ClipChunk<Storage> chunk(array, c);
    const bool is_packed = is_pack_aligned(chunk.source) && is_pack_aligned(chunk.target);
    const int packs_end = is_packed ? chunk.size - chunk.size % pack : 0;
    // Unrolled further, it spills registers on sm_100.
#pragma unroll 2
    for (int i = threadIdx.x * pack; i < packs_end; i += clip_threads * pack) {
      scale_at<pack>(chunk, i, first, factor);
    }
#pragma unroll 1
    for (int i = packs_end + threadIdx.x; i < chunk.size; i += clip_threads) {
      scale_at<1>(chunk, i, first, factor);
    }
  }
}

}  // namespace gpuopt
