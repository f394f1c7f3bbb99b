// Defects, each of which one of the emulator's checkers must find; and, where `defective` is
// false, the same without it, of which none may complain. Started by planted.py. At the end, a
// kernel that planted.py declares wrongly.
#include "shared/grid.cuh"

namespace gpuopt {

constexpr int planted_threads = 64;

template <bool defective>
__global__ void write_past_end(float* values, long long size) {
  const long long i = first_item();
  if (i < size + defective) values[i] = 1;
}

// A function of its own: UndefinedBehaviorSanitizer would know the array's size where it is
// declared.
__attribute__((noinline)) void set_to_one(float* at) { *at = 1; }

template <bool defective>
__global__ void write_past_shared_end(float* values, long long size) {
  __shared__ float of_block[planted_threads];
  set_to_one(of_block + threadIdx.x + defective);
  __syncthreads();
  if (first_item() < size) values[first_item()] = of_block[threadIdx.x];
}

template <bool defective>
__global__ void misaligned_access(float* values, long long size) {
  if (first_item() == 0) *reinterpret_cast<float4*>(values + defective) = make_float4(1, 2, 3, 4);
}

template <bool defective>
__global__ void shift_too_far(float* values, long long size) {
  const int distance = defective ? 32 : 31;
  if (first_item() == 0) values[0] = 1 << (distance - (size == 0));
}

template <bool defective>
__global__ void missing_barrier(float* values, long long size) {
  __shared__ float of_block[planted_threads];
  of_block[threadIdx.x] = first_item();
  if (!defective) __syncthreads();
  if (first_item() < size) values[first_item()] = of_block[planted_threads - 1 - threadIdx.x];
}

// Without the second barrier, a thread may overwrite what others have yet to read.
template <bool defective>
__global__ void missing_second_barrier(float* values, long long size) {
  __shared__ float of_block[planted_threads];
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    of_block[threadIdx.x] = round;
    __syncthreads();
    sum += of_block[planted_threads - 1 - threadIdx.x];
    if (!defective) __syncthreads();
  }
  if (first_item() < size) values[first_item()] = sum;
}

template <bool defective>
__global__ void missing_warp_barrier(float* values, long long size) {
  __shared__ float of_block[planted_threads];
  of_block[threadIdx.x] = first_item();
  if (!defective) __syncwarp();
  if (first_item() < size) values[first_item()] = of_block[threadIdx.x ^ 1];
}

// Barriers, however many, do not order blocks.
template <bool defective>
__global__ void race_of_blocks(float* values, long long size) {
  __syncthreads();
  if (threadIdx.x == 0) {
    if (defective) {
      values[0] += 1;
    } else {
      atomicAdd(values, 1.0f);
    }
  }
  __syncthreads();
  __syncthreads();
}

// The last block reads what the others wrote: only a fence says that it is there by then.
template <bool defective>
__global__ void missing_fence(float* values, long long size) {
  if (threadIdx.x > 0) return;
  values[1 + blockIdx.x] = 1;
  if (!defective) __threadfence();
  const bool is_last = atomicAdd(values, 1.0f) == gridDim.x - 1;
  if (!defective) __threadfence();
  if (!is_last) return;
  for (int i = 0; i < gridDim.x; ++i) values[1] += values[1 + i];
}

template <bool defective>
__global__ void barrier_of_some_warps(float* values, long long size) {
  if (defective && threadIdx.x < warp_size) return;
  __syncthreads();
}

template <bool defective>
__global__ void different_barriers(float* values, long long size) {
  if (defective && threadIdx.x < warp_size) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

template <bool defective>
__global__ void shuffle_after_exit(float* values, long long size) {
  if (defective && threadIdx.x % warp_size >= 20) return;
  const float next = __shfl_down_sync(whole_warp, 1.0f, 1);
  if (first_item() < size) values[first_item()] = next;
}

template <bool defective>
__global__ void mask_without_own_lane(float* values, long long size) {
  __syncwarp(defective ? whole_warp - 2 : whole_warp);
}

template <bool defective>
__global__ void shuffle_outside_mask(float* values, long long size) {
  if (threadIdx.x % warp_size >= 16) return;
  const float other = __shfl_sync(0xffffu, 1.0f, defective ? 16 : 15);
  if (first_item() < size) values[first_item()] = other;
}

template <bool defective>
__global__ void different_collectives(float* values, long long size) {
  if (defective && threadIdx.x % 2) {
    __any_sync(whole_warp, 1);
  } else {
    __all_sync(whole_warp, 1);
  }
}

template <bool defective>
__global__ void deadlock(float* values, long long size) {
  if (!defective || threadIdx.x % warp_size >= 16) __syncwarp();
  __syncthreads();
}

template <bool defective>
__global__ void uninitialised_shared(float* values, long long size) {
  __shared__ float of_block[planted_threads];
  if (!defective || threadIdx.x < planted_threads - 1) of_block[threadIdx.x] = 1;
  __syncthreads();
  if (first_item() < size) values[first_item()] = of_block[threadIdx.x];
}

template <bool defective>
__global__ void block_order(float* values, long long size) {
  if (threadIdx.x > 0) return;
  if (defective) {
    atomicExch(values, static_cast<float>(blockIdx.x));
  } else {
    atomicAdd(values, static_cast<float>(blockIdx.x));
  }
}

template <bool defective>
__global__ void __launch_bounds__(defective ? planted_threads / 2 : planted_threads)
    too_many_threads(float* values, long long size) {}

template <class Value>
struct Pair {
  const Value* left;
  const Value* right;
  int left_factor;
  int right_factor;
};

template <class Value>
__global__ void combine(const Pair<Value> pair, const Value* before, const Value* after,
                        Value* results, int before_factor, long long after_factor) {
  const long long i = first_item();
  results[i] = pair.left[i] * pair.left_factor + pair.right[i] * pair.right_factor +
               before[i] * before_factor + after[i] * after_factor;
}

}  // namespace gpuopt
