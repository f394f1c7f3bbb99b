#include "launches.h"

#include <string.h>

#include <algorithm>

#include "graphs.h"
#include "memory.h"

namespace driver {

namespace {

std::string records;
bool is_recording = false;

// Parameters as they were when the kernel was launched.
struct Arguments {
  std::vector<char> bytes;
  std::vector<size_t> offsets;

  Arguments(const Function& function, void** given) {
    for (unsigned size : function.sizes) {
      offsets.push_back(bytes.size());
      bytes.resize(bytes.size() + (size + 15) / 16 * 16);
    }
    for (size_t i = 0; i < offsets.size(); ++i) {
      memcpy(&bytes[offsets[i]], given[i], function.sizes[i]);
    }
  }

  std::string in_hexadecimal(const Function& function) const {
    std::string text;
    char digits[3];
    for (size_t i = 0; i < offsets.size(); ++i) {
      for (size_t at = 0; at < function.sizes[i]; ++at) {
        snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(bytes[offsets[i] + at]));
        text += digits;
      }
      text += ' ';
    }
    return text;
  }

  // Every word that is an address of device memory must be one of a block. Of CuPy's arrays that is
  // the first word; its indexers hold words that nobody has written.
  Status check(const Function& function) const {
    for (size_t i = 0; i < offsets.size(); ++i) {
      const size_t end = function.is_strict ? function.sizes[i] : std::min(function.sizes[i], 8u);
      for (size_t at = 0; at + 8 <= end; at += 8) {
        Address word;
        memcpy(&word, &bytes[offsets[i] + at], 8);
        if (function.are_pointers[i] && word &&
            find_place(reinterpret_cast<void*>(word)).kind == Kind::pageable) {
          return refuse(cudaErrorInvalidValue, "kernel %s: argument %zu, %#lx, is in host memory",
                        function.name.c_str(), i, word);
        }
        if (!is_on_device(word)) continue;
        const char* reason = why_not(reinterpret_cast<void*>(word), 1);
        if (!reason) continue;
        // An array without elements may lie at the end of its block.
        const Place place = find_place(reinterpret_cast<void*>(word));
        if (place.is_live && place.offset == place.size) continue;
        return refuse(cudaErrorInvalidValue, "kernel %s: argument %zu, %#lx, %s",
                      function.name.c_str(), i, word, reason);
      }
    }
    return cudaSuccess;
  }
};

void run(const Function& function, unsigned num_blocks, unsigned num_threads, Arguments& arguments,
         int device) {
  if (broken(device)) return;
  std::vector<void*> addresses;
  for (size_t offset : arguments.offsets) addresses.push_back(&arguments.bytes[offset]);
  const char* failure = nullptr;
  Address at = 0;
  unlock_memory(device);
  const bool ended = run_guarded(
      [&] {
        // Strict launches are of whole warps.
        const bool is_strict = function.is_strict && num_threads % 32 == 0;
        const uint64_t in_their_order = 0;
        failure = function.launch(0, num_blocks, num_threads, addresses.data(), in_their_order,
                                  is_strict);
      },
      &at);
  char text[2048];
  if (!ended) {
    snprintf(text, sizeof text, "kernel %s touched %#lx, which gpu:%d cannot",
             function.name.c_str(), at, device);
    break_device(device, cudaErrorIllegalAddress, text);
  } else if (failure) {
    snprintf(text, sizeof text, "kernel %s: %s", function.name.c_str(), failure);
    break_device(device, cudaErrorLaunchFailure, text);
  }
}

}  // namespace

void record_launch(const char* kind, const std::string& name, const dim3& grid, const dim3& block,
                   size_t shared_bytes, const std::string& arguments, size_t bytes,
                   const Stream* stream) {
  if (!is_recording) return;
  char text[512];
  snprintf(text, sizeof text, "%s\t%u\t%u\t%u\t%u\t%u\t%u\t%zu\t%zu\t%d\t%zu\t", kind, grid.x,
           grid.y, grid.z, block.x, block.y, block.z, shared_bytes, bytes, stream->device,
           reinterpret_cast<size_t>(stream->handle));
  records += text + arguments + "\t" + name + "\n";
}

void record_copy(const char* kind, const char* kind_of_bytes, size_t bytes, const Stream* stream) {
  count(kind);
  count(kind_of_bytes, long(bytes));
  record_launch(kind, "", dim3(0, 0, 0), dim3(0, 0, 0), 0, "", bytes, stream);
}

Status launch(Function* function, dim3 grid, dim3 block, size_t shared_bytes, Stream* stream,
              void** given) {
  if (stream->device != current_device()) {
    return refuse(cudaErrorInvalidResourceHandle,
                  "kernel %s: gpu:%d is the current device, and the stream is one of gpu:%d",
                  function->name.c_str(), current_device(), stream->device);
  }
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) {
    return refuse(cudaErrorNotSupported, "kernel %s: the emulator knows one dimension",
                  function->name.c_str());
  }
  if (grid.x < 1 || block.x < 1 || block.x > 1024 || shared_bytes > (48 << 10)) {
    return refuse(cudaErrorInvalidConfiguration,
                  "kernel %s: %u blocks of %u threads, %zu bytes of shared memory",
                  function->name.c_str(), grid.x, block.x, shared_bytes);
  }
  auto arguments = std::make_shared<Arguments>(*function, given);
  if (const Status status = arguments->check(*function)) return status;
  if (const Status status = refuse_implicit(stream, "a launch")) return status;
  count("launches");
  if (is_recording) {
    const std::string digits = arguments->in_hexadecimal(*function);
    record_launch("kernel", function->name, grid, block, shared_bytes, digits, 0, stream);
  }
  if (policy() == Policy::nothing) return cudaSuccess;
  enqueue(stream, "kernel", [function, grid, block, arguments, device = stream->device] {
    run(*function, grid.x, block.x, *arguments, device);
  });
  return cudaSuccess;
}

}  // namespace driver

using namespace driver;

extern "C" void driver_record_launches(int begin) {
  std::lock_guard held(lock());
  is_recording = begin;
  if (begin) records.clear();
}

extern "C" const char* driver_launches() { return records.c_str(); }
