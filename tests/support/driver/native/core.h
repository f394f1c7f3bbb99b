// What the parts of the driver share: the lock, refusals, counters and reports.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace driver {

using Address = uintptr_t;

// Numbers that both of CUDA's interfaces give the same meaning.
using Status = cudaError_t;

// A lock that its thread may take again.
class Lock {
 public:
  void lock();
  void unlock();
  // Has other threads go on for a moment, however often this one has taken the lock.
  void pause();

 private:
  std::recursive_mutex mutex;
  int depth = 0;
};

// One lock for everything. Nobody may call Python while holding it.
Lock& lock();

// The device of each thread, as cudaSetDevice has it.
int current_device();
void set_current_device(int device);

// Whether the thread's current device has made its context the thread's: the driver needs that for
// a launch. Here, few functions of the runtime do it; in CUDA, most do.
bool has_context();
void make_context_current();

constexpr int most_devices = 8;

constexpr int num_multiprocessors = 6;

struct Settings {
  int num_devices = 5;
  int cuda_version = 13000;
};
Settings& settings();

// Keeps the reason for the error that a call returns; cudaGetErrorString tells it.
Status refuse(Status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
const std::string& last_reason(Status status);

// A defect that no call can be blamed for, or whose call has returned long ago.
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));

// After a kernel has failed, every call on its device fails.
void break_device(int device, Status status, const std::string& reason);
Status broken(int device);

// Adds to a counter, which has a string literal for its name.
void count(const char* what, long by = 1);

// Stands at the head of each function of the interface.
struct Call {
  explicit Call(const char* name) : held(lock()) { count(name); }
  std::lock_guard<Lock> held;
};

}  // namespace driver
