// What each thread gets from CUDA's built-in functions, for a test that computes the same by hand.
#include "shared/grid.cuh"

namespace gpuopt {

constexpr int num_results = 17;

// Takes a value for each thread, and returns `num_results` for each.
__global__ void use_collectives(const int* values, int* results) {
  const long long i = first_item();
  const int value = values[i];
  const int lane = threadIdx.x % warp_size;
  int* mine = results + i * num_results;
  mine[0] = __shfl_sync(whole_warp, value, 5);
  mine[1] = __shfl_sync(whole_warp, value, value, 8);
  mine[2] = __shfl_up_sync(whole_warp, value, 3);
  mine[3] = __shfl_down_sync(whole_warp, value, 7, 16);
  mine[4] = __shfl_xor_sync(whole_warp, value, 9);
  mine[5] = __ballot_sync(whole_warp, value % 2);
  mine[6] = __any_sync(whole_warp, value == 3);
  mine[7] = __all_sync(whole_warp, value > 0);
  mine[8] = __match_any_sync(whole_warp, value);
  mine[9] = __syncthreads_or(value == 7);
  mine[10] = __syncthreads_and(value != 7);
  mine[11] = __syncthreads_count(value % 2);
  // Two halves of the warp, each with a mask of its own.
  const unsigned int half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  long long sum = value;
  for (int distance = 8; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(half, sum, distance);
    __syncwarp(half);
  }
  mine[12] = sum;
  mine[13] = __popc(value) + 100 * __ffs(value) + 10000 * __clz(value);
  mine[14] = __popcll(-value) + 100 * __ffsll(-value) + 10000 * __clzll(value);
  mine[15] = __shfl_xor_sync(half, value, 15);
  mine[16] = __byte_perm(0x03020100 + value, 0x07060504, 0x3607);
  // Each lane alone with itself, again and again, while others have yet to take its value above.
  for (int k = 0; k < lane; ++k) __syncwarp(1u << lane);
}

// Every thread changes the same numbers.
template <class Value>
__global__ void use_atomics(const Value* values, Value* results) {
  const Value value = values[first_item()];
  atomicAdd(&results[0], value);
  atomicSub(&results[1], value);
  atomicMin(&results[2], value);
  atomicMax(&results[3], value);
  for (Value seen = 0;;) {
    const Value before = atomicCAS(&results[4], seen, seen + value);
    if (before == seen) break;
    seen = before;
  }
  if constexpr (!(Value(1) / 2 > 0)) {
    atomicAnd(&results[5], value);
    atomicOr(&results[6], value);
    atomicXor(&results[7], value);
  }
}

__global__ void square(const float* values, float* results, long long size) {
  for (long long i = first_item(); i < size; i += items_per_pass()) {
    results[i] = values[i] * values[i];
  }
}

// a * b + c, rounded once if the compiler fuses.
__global__ void multiply_add(const float* a, const float* b, const float* c, float* results) {
  const long long i = first_item();
  results[i] = a[i] * b[i] + c[i];
}

template <class Storage>
__global__ void to_16_bits_and_back(const float* values, Storage* stored, float* results) {
  const long long i = first_item();
  stored[i] = Storage(values[i]);
  results[i] = float(stored[i]);
}

// Every type of parameter that Python can declare. What it takes by value, it writes to memory.
struct AllNumbers {
  double float64;
  long long int64;
  unsigned long long uint64;
  const float* floats;
  float float32;
  int int32;
};

__global__ void take_all(const float* floats, double* doubles, const __half* halves,
                         __nv_bfloat16* bfloats, const long long* longs, unsigned int* words,
                         const AllNumbers* structs, const AllNumbers by_value, float float32,
                         double float64, int int32, long long int64, unsigned int uint32,
                         unsigned long long uint64) {
  if (first_item() > 0) return;
  doubles[0] = float32;
  doubles[1] = float64;
  doubles[2] = int32;
  doubles[3] = int64;
  doubles[4] = uint32;
  doubles[5] = uint64;
  doubles[6] = by_value.float64;
  doubles[7] = by_value.int64;
  doubles[8] = by_value.uint64;
  doubles[9] = by_value.floats[0];
  doubles[10] = by_value.float32;
  doubles[11] = by_value.int32;
}

}  // namespace gpuopt
