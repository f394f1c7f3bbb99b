// The threads of the block that runs: how they take turns, wait at barriers and meet in warps.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <source_location>

#include "fiber.h"

namespace emulator {

constexpr int max_threads = max_fibers;
constexpr int lanes_per_warp = 32;
constexpr int max_warps = max_threads / lanes_per_warp;
constexpr int max_meetings = 32;

using Where = std::source_location;

struct Thread {
  uint3 index;
  int number;
  Fiber* fiber;
  const char* waits_in;  // null while it can run
  unsigned mask;         // of the lanes it waits for; 0 at a barrier
  Where where;
};

// Where the lanes of one mask meet, time and again.
struct Meeting {
  unsigned mask;
  unsigned arrived;
  unsigned generation;
  const char* name;
  Where where;
  // By parity of the generation: a lane may still read its values while others bring the next.
  uint64_t values[2][lanes_per_warp];
  int waiting[lanes_per_warp];
  int num_waiting;
  int num_inside;  // lanes that have arrived and not yet taken what they came for
};

struct Warp {
  unsigned present;
  unsigned exited;
  Meeting meetings[max_meetings];
  int num_meetings;
};

struct Barrier {
  int waiting[max_threads];
  int num_waiting;
  unsigned generation;
  Where where;
  int count;           // of the threads whose predicate holds, among those that have arrived
  int last_counts[2];  // by parity of the generation
};

struct Block {
  Thread threads[max_threads];
  Warp warps[max_warps];
  Barrier barrier;
  int num_threads;
  int start_order[max_threads];
  int num_started;
  int num_exited;
  int ready[max_threads];  // numbers of threads that have waited and can go on
  int num_ready;
};

inline Block block;
inline Thread* current;
inline dim3 grid_shape;
inline dim3 block_shape;
inline uint3 block_index;
inline void (*kernel)(void**);
inline void** kernel_arguments;
inline bool is_strict;
inline bool has_failed;
inline char report[1024];
inline uint64_t random_state;  // 0: everything in order

EMULATOR_INTERNAL inline uint32_t random_number() {
  // Marsaglia's xorshift64.
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<uint32_t>(random_state >> 11);
}

EMULATOR_INTERNAL inline void shuffle(int* numbers, int size) {
  for (int i = size - 1; i > 0; --i) {
    const int other = random_number() % (i + 1);
    const int number = numbers[i];
    numbers[i] = numbers[other];
    numbers[other] = number;
  }
}

// ThreadSanitizer learns which accesses are ordered from releases and acquires of tokens. Each
// barrier and meeting has two, used in turns: a thread that runs ahead to the next one must not
// hand what it did in between to one that has yet to leave this one. And each block has its own,
// as blocks are not ordered.
#if defined(__SANITIZE_THREAD__)
struct Tokens {
  uint64_t barrier[2];
  uint64_t meetings[max_warps][max_meetings][2];
};
constexpr int num_tokens = 256;
inline Tokens tokens_of_blocks[num_tokens];
inline int tokens_in_use;
inline uint64_t launch_token;
inline uint64_t exit_token;

EMULATOR_INTERNAL inline Tokens& tokens() { return tokens_of_blocks[tokens_in_use]; }
EMULATOR_INTERNAL inline void next_tokens() { tokens_in_use = (tokens_in_use + 1) % num_tokens; }
EMULATOR_INTERNAL inline void release(uint64_t* token) { __tsan_release(token); }
EMULATOR_INTERNAL inline void acquire(uint64_t* token) { __tsan_acquire(token); }
#endif

// Ends the launch, with a report that begins with the thread at fault.
[[noreturn]] EMULATOR_INTERNAL inline void fail(const char* format, ...) {
  if (!has_failed) {
    va_list arguments;
    va_start(arguments, format);
    const int length =
        snprintf(report, sizeof report, "block %u, thread %d: ", block_index.x, current->number);
    vsnprintf(report + length, sizeof report - length, format, arguments);
    va_end(arguments);
  }
  has_failed = true;
  for (;;) suspend();
}

EMULATOR_INTERNAL inline const char* file_of(const Where& where) {
  const char* slash = strrchr(where.file_name(), '/');
  return slash ? slash + 1 : where.file_name();
}

EMULATOR_INTERNAL inline bool is_same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && strcmp(a.file_name(), b.file_name()) == 0;
}

EMULATOR_INTERNAL inline void wait_in(const char* name, unsigned mask, const Where& where) {
  Thread* thread = current;
  thread->waits_in = name;
  thread->mask = mask;
  thread->where = where;
  suspend();
  current = thread;
}

EMULATOR_INTERNAL inline void wake(const int* threads, int& num_threads) {
  for (int i = 0; i < num_threads; ++i) {
    block.threads[threads[i]].waits_in = nullptr;
    block.ready[block.num_ready++] = threads[i];
  }
  num_threads = 0;
}

EMULATOR_INTERNAL inline void open_barrier() {
  Barrier& barrier = block.barrier;
  barrier.last_counts[barrier.generation % 2] = barrier.count;
  barrier.count = 0;
  ++barrier.generation;
  wake(barrier.waiting, barrier.num_waiting);
}

EMULATOR_INTERNAL inline void refuse_barrier_after_exit(const Where& where) {
  fail("__syncthreads at %s:%u is not reached by %d thread(s) of the block, which have exited",
       file_of(where), where.line(), block.num_exited);
}

// Returns the number of threads whose predicate holds.
EMULATOR_INTERNAL inline int wait_for_block(int predicate, const Where& where) {
  Barrier& barrier = block.barrier;
  const int parity = barrier.generation % 2;
  if (is_strict && block.num_exited > 0) refuse_barrier_after_exit(where);
  if (barrier.num_waiting == 0) barrier.where = where;
  if (is_strict && !is_same_place(barrier.where, where)) {
    fail("threads of one block wait in different barriers, at %s:%u and %s:%u",
         file_of(barrier.where), barrier.where.line(), file_of(where), where.line());
  }
#if defined(__SANITIZE_THREAD__)
  uint64_t* token = &tokens().barrier[parity];
  release(token);
#endif
  barrier.count += predicate != 0;
  if (barrier.num_waiting + 1 + block.num_exited == block.num_threads) {
    open_barrier();
  } else {
    barrier.waiting[barrier.num_waiting++] = current->number;
    wait_in("__syncthreads", 0, where);
  }
#if defined(__SANITIZE_THREAD__)
  acquire(token);
#endif
  return barrier.last_counts[parity];
}

EMULATOR_INTERNAL inline Meeting& meeting_of(unsigned mask) {
  Warp& warp = block.warps[current->number / lanes_per_warp];
  Meeting* unused = nullptr;
  for (int i = 0; i < warp.num_meetings; ++i) {
    Meeting& meeting = warp.meetings[i];
    if (meeting.mask == mask) return meeting;
    if (meeting.num_inside == 0) unused = &meeting;
  }
  if (!unused) {
    if (warp.num_meetings == max_meetings) {
      fail("a warp waits for more than %d masks at once", max_meetings);
    }
    unused = &warp.meetings[warp.num_meetings++];
    memset(static_cast<void*>(unused), 0, sizeof *unused);
  }
  unused->mask = mask;
  return *unused;
}

EMULATOR_INTERNAL inline void end_meeting(Meeting& meeting) {
  meeting.arrived = 0;
  ++meeting.generation;
  wake(meeting.waiting, meeting.num_waiting);
}

EMULATOR_INTERNAL inline void check_mask(const char* name, unsigned mask, const Where& where) {
  const Warp& warp = block.warps[current->number / lanes_per_warp];
  const int lane = current->number % lanes_per_warp;
  if (!(mask >> lane & 1)) {
    fail("%s at %s:%u: the mask %08x lacks the lane itself, %d", name, file_of(where), where.line(),
         mask, lane);
  }
  if (is_strict && (mask & ~warp.present)) {
    fail("%s at %s:%u: the mask %08x names lanes that the block does not have, %08x", name,
         file_of(where), where.line(), mask, mask & ~warp.present);
  }
  if (is_strict && (mask & warp.exited)) {
    fail("%s at %s:%u: the mask %08x names lanes that have exited, %08x", name, file_of(where),
         where.line(), mask, mask & warp.exited);
  }
}

// Waits for all lanes of the mask, and returns the value that each brought.
// `orders_memory` is what sets __syncwarp apart.
EMULATOR_INTERNAL inline const uint64_t* meet(const char* name, unsigned mask, uint64_t value,
                                              const Where& where, bool orders_memory = false) {
  check_mask(name, mask, where);
  const int lane = current->number % lanes_per_warp;
  Warp& warp = block.warps[current->number / lanes_per_warp];
  Meeting& meeting = meeting_of(mask);
  if (meeting.arrived == 0) {
    meeting.name = name;
    meeting.where = where;
  }
  if (is_strict && (strcmp(meeting.name, name) || !is_same_place(meeting.where, where))) {
    fail("lanes of one warp meet in %s at %s:%u and %s at %s:%u", meeting.name,
         file_of(meeting.where), meeting.where.line(), name, file_of(where), where.line());
  }
  const int parity = meeting.generation % 2;
#if defined(__SANITIZE_THREAD__)
  uint64_t* token = &tokens().meetings[&warp - block.warps][&meeting - warp.meetings][parity];
  if (orders_memory) release(token);
#endif
  meeting.values[parity][lane] = value;
  meeting.arrived |= 1u << lane;
  ++meeting.num_inside;
  if (((meeting.arrived | warp.exited) & mask & warp.present) == (mask & warp.present)) {
    end_meeting(meeting);
  } else {
    meeting.waiting[meeting.num_waiting++] = current->number;
    wait_in(name, mask, where);
  }
#if defined(__SANITIZE_THREAD__)
  if (orders_memory) acquire(token);
#endif
  (void)orders_memory;
  --meeting.num_inside;
  return meeting.values[parity];
}

// Those who wait for a thread that has exited need not any longer, or wait in vain.
EMULATOR_INTERNAL inline void exit_thread(Thread* thread) {
  Warp& warp = block.warps[thread->number / lanes_per_warp];
  warp.exited |= 1u << (thread->number % lanes_per_warp);
  ++block.num_exited;
  for (int i = 0; i < warp.num_meetings; ++i) {
    Meeting& meeting = warp.meetings[i];
    if (meeting.arrived == 0 || !(meeting.mask & warp.exited)) continue;
    if (is_strict) {
      current = &block.threads[meeting.waiting[0]];
      check_mask(meeting.name, meeting.mask, meeting.where);
    }
    const unsigned mask = meeting.mask & warp.present;
    if (((meeting.arrived | warp.exited) & mask) == mask) end_meeting(meeting);
  }
  const Barrier& barrier = block.barrier;
  if (barrier.num_waiting == 0) return;
  if (is_strict) {
    current = &block.threads[barrier.waiting[0]];
    refuse_barrier_after_exit(barrier.where);
  }
  if (barrier.num_waiting + block.num_exited == block.num_threads) open_barrier();
}

// What a fiber does: it runs threads from first to last, one after another, while none waits.
EMULATOR_INTERNAL inline void run_threads() {
  enter_fiber();
  Fiber* fiber = running;
  for (;;) {
    while (block.num_started < block.num_threads && !has_failed) {
      Thread* thread = &block.threads[block.start_order[block.num_started++]];
      thread->fiber = fiber;
      thread->waits_in = nullptr;
      current = thread;
#if defined(__SANITIZE_THREAD__)
      acquire(&launch_token);
#endif
      kernel(kernel_arguments);
#if defined(__SANITIZE_THREAD__)
      release(&exit_token);
#endif
      running = fiber;
      exit_thread(thread);
#if defined(__SANITIZE_THREAD__)
      break;  // the next thread is to be another one to ThreadSanitizer too
#endif
    }
    idle_fibers[num_idle++] = fiber;
    suspend();
  }
}

EMULATOR_INTERNAL inline void report_deadlock() {
  int at_barrier = 0;
  int in_warp = 0;
  const Thread* first = nullptr;
  for (int i = 0; i < block.num_threads; ++i) {
    const Thread& thread = block.threads[i];
    if (!thread.waits_in) continue;
    if (!first) first = &thread;
    (thread.mask ? in_warp : at_barrier) += 1;
  }
  snprintf(report, sizeof report,
           "block %u: deadlock: %d thread(s) wait at __syncthreads, %d for lanes of their warp, %d "
           "have exited; thread %d waits in %s at %s:%u, mask %08x",
           block_index.x, at_barrier, in_warp, block.num_exited, first->number, first->waits_in,
           file_of(first->where), first->where.line(), first->mask);
  has_failed = true;
}

EMULATOR_INTERNAL inline void begin_block() {
  block.num_started = 0;
  block.num_exited = 0;
  block.num_ready = 0;
  block.barrier.num_waiting = 0;
  block.barrier.count = 0;
  for (int i = 0; i < block.num_threads; ++i) block.threads[i].waits_in = nullptr;
  for (int i = 0; i * lanes_per_warp < block.num_threads; ++i) {
    const int lanes = block.num_threads - i * lanes_per_warp;
    Warp& warp = block.warps[i];
    warp.present = lanes >= lanes_per_warp ? ~0u : (1u << lanes) - 1;
    warp.exited = 0;
    warp.num_meetings = 0;
  }
#if defined(__SANITIZE_THREAD__)
  next_tokens();
#endif
}

EMULATOR_INTERNAL inline int take_ready() {
  const int taken = random_state ? random_number() % block.num_ready : 0;
  const int thread = block.ready[taken];
  --block.num_ready;
  memmove(block.ready + taken, block.ready + taken + 1, (block.num_ready - taken) * sizeof(int));
  return thread;
}

// Runs all threads of the block, unless one fails.
EMULATOR_INTERNAL inline void run_block() {
  begin_block();
  while (!has_failed && (block.num_ready > 0 || block.num_started < block.num_threads)) {
    const bool all_started = block.num_started == block.num_threads;
    const bool goes_on =
        block.num_ready > 0 && (all_started || !random_state || random_number() % 2);
    if (goes_on) {
      current = &block.threads[take_ready()];
      resume(current->fiber);
    } else {
      resume(take_fiber());
    }
  }
  if (!has_failed && block.num_exited < block.num_threads) report_deadlock();
}

}  // namespace emulator
