#include "graphs.h"
#include "launches.h"
#include "libraries/call.h"
#include "memory.h"

namespace driver {

namespace {

constexpr int failed = 13;

}  // namespace

Handle* new_handle() { return new Handle{current_device()}; }

int library_call(const char* name, const Handle* handle, const std::vector<Operand>& operands,
                 std::function<void()> run) {
  const Call call(name);
  Stream* stream = find_stream(handle->device, handle->stream);
  if (!stream || stream->device != handle->device || handle->device != current_device()) {
    report("%s: the handle is one of gpu:%d, the stream %p one of gpu:%d, and gpu:%d is current",
           name, handle->device, handle->stream, stream ? stream->device : -1, current_device());
    return failed;
  }
  for (const Operand& operand : operands) {
    const char* reason = why_not(operand.at, operand.num_bytes);
    if (!reason && operand.num_bytes && find_place(operand.at).kind == Kind::pageable) {
      reason = "is in host memory";
    }
    if (reason) {
      report("%s: %p %s", name, operand.at, reason);
      return failed;
    }
  }
  if (broken(stream->device) || refuse_implicit(stream, name)) return failed;
  record_launch("library", name, dim3(0, 0, 0), dim3(0, 0, 0), 0, "", 0, stream);
  enqueue(stream, "library", std::move(run));
  return 0;
}

int missing(const char* name) {
  const Call call(name);
  report("%s is not there", name);
  return failed;
}

}  // namespace driver
