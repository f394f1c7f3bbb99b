// Fibers: stacks that take turns on one operating-system thread.
//
// The emulator's variables are `inline`, so that all libraries of one process share them: they are
// never at work at the same time.
//
// suspend() goes back to the main stack, and resume(fiber) from there into a fiber. What runs on
// a fresh fiber is run_threads(), defined in block.h.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

// The emulator's own memory belongs to all threads: sanitizers must look at the kernels alone. What
// has this attribute calls no templates of the standard library, which have not.
#define EMULATOR_INTERNAL \
  __attribute__((noinline, no_sanitize("thread"), no_sanitize("address"), no_sanitize("undefined")))

namespace emulator {

struct Fiber {
  ucontext_t context;
  jmp_buf position;
  char* stack;
  bool is_fresh;
  void* sanitizer_state;
};

constexpr int max_fibers = 1024;
constexpr size_t page_size = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t stack_size = 256 << 10;
#elif defined(__SANITIZE_THREAD__)
constexpr size_t stack_size = 64 << 10;
#else
constexpr size_t stack_size = 128 << 10;
#endif

inline Fiber* running;
inline Fiber* all_fibers[max_fibers];
inline int num_fibers;
inline Fiber* idle_fibers[max_fibers];
inline int num_idle;

// The main stack, which launches.
inline ucontext_t main_context;
inline jmp_buf main_position;
inline void* main_sanitizer_state;
inline const void* main_stack;
inline size_t main_stack_size;

void run_threads();

EMULATOR_INTERNAL inline void suspend() {
#if defined(__SANITIZE_ADDRESS__)
  Fiber* fiber = running;
  __sanitizer_start_switch_fiber(&fiber->sanitizer_state, main_stack, main_stack_size);
  swapcontext(&fiber->context, &main_context);
  __sanitizer_finish_switch_fiber(fiber->sanitizer_state, nullptr, nullptr);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(main_sanitizer_state, __tsan_switch_to_fiber_no_sync);
  swapcontext(&running->context, &main_context);
#else
  // swapcontext makes two system calls to keep signal masks.
  if (!_setjmp(running->position)) _longjmp(main_position, 1);
#endif
}

EMULATOR_INTERNAL inline void resume(Fiber* fiber) {
  running = fiber;
#if defined(__SANITIZE_ADDRESS__)
  fiber->is_fresh = false;
  __sanitizer_start_switch_fiber(&main_sanitizer_state, fiber->stack, stack_size);
  swapcontext(&main_context, &fiber->context);
  __sanitizer_finish_switch_fiber(main_sanitizer_state, nullptr, nullptr);
#elif defined(__SANITIZE_THREAD__)
  fiber->is_fresh = false;
  __tsan_switch_to_fiber(fiber->sanitizer_state, __tsan_switch_to_fiber_no_sync);
  swapcontext(&main_context, &fiber->context);
#else
  if (_setjmp(main_position)) return;
  if (fiber->is_fresh) {
    fiber->is_fresh = false;
    setcontext(&fiber->context);
  }
  _longjmp(fiber->position, 1);
#endif
}

// To be called first on a fresh fiber.
EMULATOR_INTERNAL inline void enter_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_size);
#endif
}

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer's idea of each CUDA thread. Making one takes most of a millisecond and of a
// megabyte, so they serve again in the next launch, which comes after this one anyway. Within one
// launch they must not: the second user would seem to be ordered after the first.
constexpr int max_states = 6000;  // ThreadSanitizer itself holds 8128
constexpr int max_kept_states = 1024;
inline void* states[max_states];
inline int num_states;
inline int num_states_taken;

EMULATOR_INTERNAL inline void* take_state() {
  const int taken = num_states_taken++ % max_states;
  if (num_states_taken > max_states) {
    // As good as possible: what has been forgotten is long past.
    __tsan_destroy_fiber(states[taken]);
    states[taken] = __tsan_create_fiber(0);
  } else if (taken == num_states) {
    states[num_states++] = __tsan_create_fiber(0);
  }
  return states[taken];
}

EMULATOR_INTERNAL inline void give_back_states(bool are_sound) {
  const int num_kept = are_sound ? max_kept_states : 0;
  if (!are_sound) {
    // Threads that have not come to their end have released nothing: what comes after this launch
    // is ordered after them by these switches.
    for (int i = 0; i < num_states; ++i) {
      __tsan_switch_to_fiber(states[i], 0);
      __tsan_switch_to_fiber(main_sanitizer_state, 0);
    }
  }
  while (num_states > num_kept) __tsan_destroy_fiber(states[--num_states]);
  num_states_taken = 0;
}
#endif

EMULATOR_INTERNAL inline Fiber* new_fiber() {
  Fiber* fiber = new Fiber();
  all_fibers[num_fibers++] = fiber;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, stack_size + page_size, PROT_READ | PROT_WRITE, flags, -1, 0);
  // A kernel that needs more stack is to end here rather than in its neighbour's.
  mprotect(memory, page_size, PROT_NONE);
  fiber->stack = static_cast<char*>(memory) + page_size;
  fiber->is_fresh = true;
  return fiber;
}

EMULATOR_INTERNAL inline Fiber* take_fiber() {
  Fiber* fiber = num_idle > 0 ? idle_fibers[--num_idle] : new_fiber();
#if defined(__SANITIZE_THREAD__)
  if (!fiber->is_fresh) {
    // Mapped anew, so that what an earlier thread did to this memory is forgotten.
    mmap(fiber->stack, stack_size, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    fiber->is_fresh = true;
  }
  fiber->sanitizer_state = take_state();
#endif
  if (fiber->is_fresh) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber->stack, stack_size);
#endif
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = stack_size;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, run_threads, 0);
  }
  return fiber;
}

// Drops whatever the last launch left on the fibers' stacks: it may have failed in mid-kernel, or
// have been made by another operating-system thread.
EMULATOR_INTERNAL inline void refresh_fibers() {
#if defined(__SANITIZE_THREAD__)
  main_sanitizer_state = __tsan_get_current_fiber();
#endif
  num_idle = 0;
  for (int i = 0; i < num_fibers; ++i) {
    all_fibers[i]->is_fresh = true;
    idle_fibers[num_idle++] = all_fibers[i];
  }
}

}  // namespace emulator
