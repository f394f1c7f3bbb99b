// What the functions of CUDA's runtime have in common. CuPy carries the runtime within itself; its
// functions are made to jump to those of runtime_*.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include "streams.h"

// The names that CuPy's copy of the runtime has, whatever the headers make of them.
#undef cudaGetDeviceProperties
#undef cudaEventElapsedTime
#undef cudaGraphInstantiate

namespace driver {

constexpr size_t total_memory = size_t(16) << 30;

#define REFUSE_IF(condition) \
  if (const Status status = condition) return status

Status check_device(int device);
Stream* stream_of(const char* call, void* handle, Status* status);
Event* event_of(const char* call, void* handle, Status* status);

// Finds what a handle stands for, or returns with an error.
#define STREAM(stream, handle)                                                        \
  Status status_of_##stream;                                                          \
  [[maybe_unused]] Stream* stream = stream_of(__func__, handle, &status_of_##stream); \
  REFUSE_IF(status_of_##stream)

#define EVENT(event, handle)                                                      \
  Status status_of_##event;                                                       \
  [[maybe_unused]] Event* event = event_of(__func__, handle, &status_of_##event); \
  REFUSE_IF(status_of_##event)

}  // namespace driver
