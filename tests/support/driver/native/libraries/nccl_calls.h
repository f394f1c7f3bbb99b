// Communicators and collectives: what NCCL's functions have in common.
#pragma once

#include <cstddef>

#include "libraries/nccl_ranks.h"
#include "streams.h"

namespace nccl {

// ncclResult_t
enum Result {
  success = 0,
  system_error = 2,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
};

struct Comm {
  std::shared_ptr<Ranks> ranks;
  int rank, size, device;
  // Until `end`; read while a thread waits for the other ranks' start.
  std::atomic<bool> is_aborted = false;
  uint64_t issued = 0;
  // The operation of its last collective.
  driver::Point last = {nullptr, 0};
};

// Returns null, with a report, if a handle is none; of the null handle, without.
std::shared_ptr<Comm> find(const char* name, void* handle);

// Begins a communicator, for which `end_group` waits.
Result start(const char* name, void** handle, int size, const char* identity, int rank, int device);
// Adds a call to the group, or makes it at once if there is none.
Result add(const char* name, void* handle, void* stream, Call call, const void* send,
           void* receive);
Result end(const char* name, void* handle, bool is_abort);

// How many groups this thread has begun and not ended.
int& group_depth();
// Waits for new communicators, and enqueues the collectives.
Result end_group();

double now_s();

}  // namespace nccl
