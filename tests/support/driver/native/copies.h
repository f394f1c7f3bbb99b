// Copies and fills.
#pragma once

#include "streams.h"

namespace driver {

struct Copy {
  const char* call;
  void* target;
  const void* source;
  size_t num_bytes;
  cudaMemcpyKind kind = cudaMemcpyDefault;
  bool is_async = true;
};

Status copy(const Copy& what, Stream* stream);
Status fill(const char* call, void* target, int value, size_t num_bytes, Stream* stream);

}  // namespace driver
