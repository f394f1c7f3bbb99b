// The kernels of a library, and how one is launched.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "block.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace emulator {

// Is added to the size of an argument that is a pointer.
constexpr unsigned is_pointer = 1u << 31;

// Calls a kernel with the arguments at given addresses, as cuLaunchKernel takes them.
template <auto function>
struct Call;

template <class... Parameters, void (*function)(Parameters...)>
struct Call<function> {
  template <size_t... positions>
  static void call(void** arguments, std::index_sequence<positions...>) {
    function(*static_cast<std::remove_cv_t<Parameters>*>(arguments[positions])...);
  }
  static void call(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>()); }

  static constexpr size_t size = (size_t(0) + ... + ((sizeof(Parameters) + 7) / 8 * 8));
  static constexpr unsigned sizes[] = {
      (sizeof(Parameters) | (std::is_pointer_v<Parameters> ? is_pointer : 0))..., 0};
};

struct Kernel {
  void (*call)(void**);
  size_t size;  // of all arguments, in bytes
  int max_threads;
  const unsigned* sizes;  // of each argument, or with is_pointer; and after the last one 0
};

// Takes what __launch_bounds__ does.
constexpr int launch_bound(int max_threads, ...) { return max_threads; }

template <auto function>
constexpr Kernel describe(int max_threads = emulator::max_threads) {
  return {Call<function>::call, Call<function>::size, max_threads, Call<function>::sizes};
}

// What CUDA allows.
constexpr unsigned max_blocks = INT_MAX;
constexpr size_t max_argument_bytes = 4096;

// Whole pages, set by shared_memory.ld.
extern "C" {
extern uint64_t emulator_shared_begin[] __attribute__((visibility("hidden")));
extern uint64_t emulator_shared_end[] __attribute__((visibility("hidden")));
}

// Fills shared memory with NaN: a block cannot rely on zeros, nor on what the one before left.
EMULATOR_INTERNAL inline void clear_shared_memory() {
#if defined(__SANITIZE_THREAD__)
  // Mapped anew, so that accesses by the block before are forgotten.
  mmap(emulator_shared_begin, (emulator_shared_end - emulator_shared_begin) * sizeof(uint64_t),
       PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
  // Not memset, in which sanitizers would look at every write.
  for (volatile uint64_t* at = emulator_shared_begin; at < emulator_shared_end; ++at) *at = ~0ull;
}

// Flushes denormals to zero while it lives, as CuPy has NVRTC do for float32 (-ftz=true). An x86
// flushes those of float64 too, which a GPU keeps.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  EMULATOR_INTERNAL FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  EMULATOR_INTERNAL ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

EMULATOR_INTERNAL inline bool is_within_limits(const Kernel& of, unsigned num_blocks,
                                               unsigned num_threads) {
  if (num_blocks < 1 || num_blocks > max_blocks) {
    snprintf(report, sizeof report, "%u blocks; it must be 1 to %u", num_blocks, max_blocks);
  } else if (num_threads < 1 || num_threads > unsigned(max_threads) ||
             (is_strict && num_threads % lanes_per_warp)) {
    snprintf(report, sizeof report, "blocks of %u threads; it must be a multiple of %d up to %d",
             num_threads, lanes_per_warp, max_threads);
  } else if (num_threads > unsigned(of.max_threads)) {
    snprintf(report, sizeof report, "blocks of %u threads; __launch_bounds__ says at most %d",
             num_threads, of.max_threads);
  } else if (of.size > max_argument_bytes) {
    snprintf(report, sizeof report, "arguments of %zu bytes; it must be at most %zu", of.size,
             max_argument_bytes);
  } else {
    return true;
  }
  return false;
}

EMULATOR_INTERNAL inline void begin_launch(const Kernel& of, unsigned num_blocks,
                                           unsigned num_threads, void** arguments, uint64_t seed) {
  kernel = of.call;
  kernel_arguments = arguments;
  grid_shape = dim3(num_blocks);
  block_shape = dim3(num_threads);
  // An odd multiplier: no seed but 0 gives 0.
  random_state = seed * 0x9E3779B97F4A7C15ull;
  block.num_threads = num_threads;
  for (int i = 0; i < block.num_threads; ++i) {
    block.threads[i].number = i;
    block.threads[i].index = make_uint3(i, 0, 0);
    block.start_order[i] = i;
  }
  refresh_fibers();
#if defined(__SANITIZE_THREAD__)
  acquire(&exit_token);
  release(&launch_token);
#endif
}

// Returns whether all went well; if not, `report` says why.
EMULATOR_INTERNAL inline bool launch(const Kernel& of, unsigned num_blocks, unsigned num_threads,
                                     void** arguments, uint64_t seed, bool strict) {
  has_failed = false;
  is_strict = strict;
  if (!is_within_limits(of, num_blocks, num_threads)) return false;
  begin_launch(of, num_blocks, num_threads, arguments, seed);
  int* order = static_cast<int*>(malloc(num_blocks * sizeof(int)));
  for (unsigned i = 0; i < num_blocks; ++i) order[i] = i;
  if (random_state) shuffle(order, num_blocks);
  {
    const FlushDenormals flush_denormals;
    for (unsigned i = 0; i < num_blocks && !has_failed; ++i) {
      block_index = make_uint3(order[i], 0, 0);
      if (random_state) shuffle(block.start_order, block.num_threads);
      clear_shared_memory();
      run_block();
    }
  }
  free(order);
#if defined(__SANITIZE_THREAD__)
  acquire(&exit_token);
  give_back_states(!has_failed);
#endif
  return !has_failed;
}

}  // namespace emulator

// Exports the kernels that are listed, each as ::emulator::describe<function>(max_threads).
#define EMULATOR_KERNELS(...)                                                                    \
  static const ::emulator::Kernel emulator_kernels[] = {__VA_ARGS__};                            \
  extern "C" const char* emulator_launch(int kernel, unsigned num_blocks, unsigned num_threads,  \
                                         void** arguments, uint64_t seed, int strict) {          \
    const bool succeeded = ::emulator::launch(emulator_kernels[kernel], num_blocks, num_threads, \
                                              arguments, seed, strict);                          \
    return succeeded ? nullptr : ::emulator::report;                                             \
  }                                                                                              \
  extern "C" const unsigned* emulator_argument_sizes(int kernel) {                               \
    return emulator_kernels[kernel].sizes;                                                       \
  }
