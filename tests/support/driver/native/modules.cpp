// CUDA's driver: contexts, modules and launches. And what Python asks of this one.
#include <string.h>

#include "copies.h"
#include "graphs.h"
#include "launches.h"
#include "memory.h"

using namespace driver;

namespace {

// Python's part: fills in a function of a module, or returns false and has told why.
struct Found {
  decltype(Function::launch) launch;
  const char* name;
  const unsigned* sizes;  // of its arguments, or with is_pointer; and after the last one 0
  int is_strict;
};
constexpr unsigned is_pointer = 1u << 31;
using Find = int (*)(long module, const char* name, Found* found);
Find find_function;
thread_local long module_of_thread;

std::map<std::pair<long, std::string>, std::unique_ptr<Function>> functions;

}  // namespace

// What this thread's last call of `driver_take` got.
thread_local void* last_taken = nullptr;

extern "C" {

int cuInit(unsigned) { return 0; }

// NVRTC asks for it, and does without.
int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return cudaErrorNotSupported;
}

int cuDriverGetVersion(int* version) {
  *version = settings().cuda_version;
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = settings().num_devices;
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = index;
  return index < settings().num_devices ? 0 : cudaErrorInvalidDevice;
}

int cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "a GPU of the stub driver");
  return 0;
}

int cuGetErrorName(int status, const char** name) {
  *name = cudaGetErrorName(cudaError_t(status));
  return 0;
}

int cuGetErrorString(int status, const char** text) {
  *text = cudaGetErrorString(cudaError_t(status));
  return 0;
}

// A context for each device: its number, from 1.
int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(intptr_t(current_device() + 1));
  return 0;
}

int cuCtxSetCurrent(void* context) {
  set_current_device(int(reinterpret_cast<intptr_t>(context)) - 1);
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = current_device();
  return 0;
}

int cuCtxCreate(void** context, unsigned, int device) {
  set_current_device(device);
  return cuCtxGetCurrent(context);
}

int cuCtxDestroy(void*) { return 0; }
int cuDevicePrimaryCtxRelease(int) { return 0; }

int cuStreamGetCtx(void* handle, void** context) {
  const Call call(__func__);
  const Stream* stream = find_stream(current_device(), handle);
  if (!stream) return refuse(cudaErrorInvalidResourceHandle, "%p is no stream", handle);
  *context = reinterpret_cast<void*>(intptr_t(stream->device + 1));
  return 0;
}

// What this thread loads next is the module that Python has given this number.
void driver_next_module(long number) { module_of_thread = number; }

int cuModuleLoadData(void** module, const void*) {
  const Call call(__func__);
  if (const Status status = refuse_while_capturing(__func__)) return status;
  if (!module_of_thread) {
    return refuse(cudaErrorNotSupported, "the driver runs modules that CuPy compiles from source");
  }
  *module = reinterpret_cast<void*>(module_of_thread);
  return 0;
}

int cuModuleLoad(void**, const char* file) {
  const Call call(__func__);
  return refuse(cudaErrorNotSupported, "%s: the driver runs modules that CuPy compiles from source",
                file);
}

int cuModuleUnload(void*) { return 0; }

int cuModuleGetFunction(void** function, void* module, const char* name) {
  const long number = reinterpret_cast<long>(module);
  {
    const Call call(__func__);
    const auto it = functions.find({number, name});
    if (it != functions.end()) {
      *function = it->second.get();
      return 0;
    }
  }
  // Not under the lock: whoever holds Python's may be waiting for it.
  Found found = {};
  if (!find_function || !find_function(number, name, &found)) {
    return refuse(cudaErrorSymbolNotFound, "%s cannot be run here; see the report", name);
  }
  const std::lock_guard held(lock());
  auto made = std::make_unique<Function>();
  made->name = found.name;
  made->launch = found.launch;
  made->is_strict = found.is_strict;
  for (const unsigned* size = found.sizes; *size; ++size) {
    made->sizes.push_back(*size & ~is_pointer);
    made->are_pointers.push_back(*size & is_pointer);
  }
  // Another thread may have been faster.
  *function = functions.try_emplace({number, name}, std::move(made)).first->second.get();
  return 0;
}

int cuModuleGetGlobal(void**, size_t*, void*, const char* name) {
  const Call call(__func__);
  return refuse(cudaErrorNotSupported, "global variables, as %s, are not supported", name);
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void* handle, void** arguments, void**) {
  const Call call(__func__);
  if (!has_context()) {
    return refuse(cudaErrorDeviceUninitialized, "a launch by a thread that has no context yet");
  }
  Stream* stream = find_stream(current_device(), handle);
  if (!stream) return refuse(cudaErrorInvalidResourceHandle, "%p is no stream", handle);
  if (const Status status = broken(stream->device)) return status;
  return launch(static_cast<Function*>(function), dim3(grid_x, grid_y, grid_z),
                dim3(block_x, block_y, block_z), shared_bytes, stream, arguments);
}

int cuLaunchCooperativeKernel() {
  return refuse(cudaErrorNotSupported, "cooperative launches are not supported");
}

int cuFuncGetAttribute(int* value, int, void*) {
  *value = 32;
  return 0;
}

int cuFuncSetAttribute(void*, int, int) { return 0; }

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* value, void*, int, size_t) {
  *value = 4;
  return 0;
}

int cuOccupancyMaxPotentialBlockSize(int* blocks, int* threads, void*, void*, size_t, int) {
  *blocks = 4 * num_multiprocessors;
  *threads = 256;
  return 0;
}

// ---- For Python

// Kernels that wait until it is late enough need not wait long.
unsigned long long driver_timer() {
  advance_device_time(100000);
  return device_time();
}

void driver_set_find(Find find) { find_function = find; }

void driver_set_policy(int policy, uint64_t seed) {
  const std::lock_guard held(lock());
  set_policy(static_cast<Policy>(policy), seed);
}

void driver_wait_for_everything() {
  const std::lock_guard held(lock());
  wait_for_everything();
}

void driver_check_memory() {
  const std::lock_guard held(lock());
  check_memory();
}

// Calls a function of Python's that takes memory, and says so by `driver_part_taken`. Ctrl-C may
// end it, which Python only reports then. So it is called once more.
void* driver_take(void* function, size_t num_bytes, int device) {
  const auto take = reinterpret_cast<void (*)(void*, size_t, int)>(function);
  last_taken = nullptr;
  take(nullptr, num_bytes, device);
  if (!last_taken) take(nullptr, num_bytes, device);
  return last_taken;
}

void driver_part_taken(int device, void* at, size_t num_bytes, size_t with_canary, void* stream) {
  const std::lock_guard held(lock());
  part_taken(device, at, num_bytes, with_canary, stream);
  last_taken = at;
}

void driver_part_freed(void* at) {
  const std::lock_guard held(lock());
  part_freed(at);
}

// The end of what a stream has been given so far; and whether that is certain to be done before
// whatever another stream is given next.
void driver_mark(int device, void* handle, uint64_t* id, uint64_t* number) {
  const std::lock_guard held(lock());
  const Stream* stream = find_stream(device, handle);
  *id = stream ? stream->id : 0;
  *number = stream ? stream->issued : 0;
}

int driver_precedes(uint64_t id, uint64_t number, int device, void* next) {
  const std::lock_guard held(lock());
  return precedes(id, number, find_stream(device, next));
}

size_t driver_num_remembered() {
  const std::lock_guard held(lock());
  return num_remembered();
}

}  // extern "C"
