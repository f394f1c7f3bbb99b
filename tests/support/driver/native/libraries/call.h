// What stands in for cuBLAS, cuFFT and cuSOLVER: calls of a library become work on a stream.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

namespace driver {

// Bytes that a call reads or writes.
struct Operand {
  const void* at;
  size_t num_bytes;
};

// What a library remembers between calls, behind its handle.
struct Handle {
  int device;
  void* stream = nullptr;
  int pointer_mode = 0;  // 1: scalars are on the device
};

Handle* new_handle();

// Checks the operands and enqueues the work; returns 0, or a number that all libraries take for a
// failure.
int library_call(const char* name, const Handle* handle, const std::vector<Operand>& operands,
                 std::function<void()> run);
// For functions that CuPy needs to load a library, and nobody has called yet.
int missing(const char* name);

// Where the driver reads and writes the program's memory.
char* alias(const void* at);

template <class Value>
Value* memory(const void* at) {
  return reinterpret_cast<Value*>(alias(at));
}

}  // namespace driver
