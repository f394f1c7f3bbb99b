// Kernels: how they are found and launched, and the list of launches that a test can ask for.
#pragma once

#include "streams.h"

namespace driver {

// What Python finds for the name of a kernel. `launch` is the emulator's.
struct Function {
  std::string name;
  const char* (*launch)(int index, unsigned num_blocks, unsigned num_threads, void** arguments,
                        uint64_t seed, int strict) = nullptr;
  bool is_strict = true;        // see EmulatorLauncher
  std::vector<unsigned> sizes;  // of its parameters
  std::vector<bool> are_pointers;
};

// Adds to the list of launches, if one is kept: kernels with their arguments' bytes, copies, fills.
void record_launch(const char* kind, const std::string& name, const dim3& grid, const dim3& block,
                   size_t shared_bytes, const std::string& arguments, size_t bytes,
                   const Stream* stream);
// Copies and fills are counted, too: how many, and their bytes under `kind_of_bytes`.
void record_copy(const char* kind, const char* kind_of_bytes, size_t bytes, const Stream* stream);

Status launch(Function* function, dim3 grid, dim3 block, size_t shared_bytes, Stream* stream,
              void** arguments);

}  // namespace driver
