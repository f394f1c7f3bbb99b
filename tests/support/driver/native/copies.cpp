#include "copies.h"

#include <string.h>

#include <string_view>

#include "graphs.h"
#include "launches.h"
#include "memory.h"

namespace driver {

namespace {

const char* const kinds[] = {"host to host", "host to device", "device to host",
                             "device to device"};
const char* const bytes_of_kinds[] = {"host to host bytes", "host to device bytes",
                                      "device to host bytes", "device to device bytes"};

Status check(const Copy& what) {
  for (const void* at : {static_cast<const void*>(what.target), what.source}) {
    if (const char* reason = why_not(at, what.num_bytes)) {
      return refuse(cudaErrorInvalidValue, "%s of %zu bytes: %p %s", what.call, what.num_bytes, at,
                    reason);
    }
  }
  return cudaSuccess;
}

cudaMemcpyKind kind_of(const Place& target, const Place& source) {
  return static_cast<cudaMemcpyKind>(2 * (source.kind == Kind::device) +
                                     (target.kind == Kind::device));
}

size_t digest(const void* at, size_t num_bytes) {
  return std::hash<std::string_view>()({static_cast<const char*>(at), num_bytes});
}

void move(void* target, const void* source, size_t num_bytes) {
  ++writes_to(target);
  memmove(alias(target), alias(source), num_bytes);
}

// A copy from or to page-locked memory, which the program must not touch until the copy is done.
std::function<void()> watched(const Copy& what, const void* page_locked) {
  const size_t before = digest(page_locked, what.num_bytes);
  return [=, writes = writes_to(page_locked)] {
    if (writes_to(page_locked) == writes && digest(page_locked, what.num_bytes) != before) {
      report("page-locked memory at %p was written before a queued %s %s it (%zu bytes, %s)",
             page_locked, what.call, page_locked == what.source ? "read" : "wrote to",
             what.num_bytes, kinds[what.kind]);
    }
    move(what.target, what.source, what.num_bytes);
  };
}

}  // namespace

Status copy(const Copy& given, Stream* stream) {
  Copy what = given;
  const Place target = find_place(what.target), source = find_place(what.source);
  const cudaMemcpyKind kind = kind_of(target, source);
  if (what.kind != cudaMemcpyDefault && what.kind != kind && what.num_bytes) {
    return refuse(cudaErrorInvalidValue, "%s: the copy is from %s, and the call says %s", what.call,
                  kinds[kind], what.kind < 4 ? kinds[what.kind] : "something else");
  }
  what.kind = kind;
  if (const Status status = check(what)) return status;
  if (const Status status = refuse_implicit(stream, what.call)) return status;
  const bool is_pageable =
      kind != cudaMemcpyDeviceToDevice &&
      (kind == cudaMemcpyHostToDevice ? source : target).kind == Kind::pageable;
  if (!what.is_async || (is_pageable && kind != cudaMemcpyHostToDevice)) {
    if (const Status status = refuse_if_captured(stream, what.call)) return status;
  }
  if (stream->capture && is_pageable) {
    return refuse_if_captured(stream, "a copy of memory that is not page-locked");
  }
  record_copy(kinds[kind], bytes_of_kinds[kind], what.num_bytes, stream);
  std::function<void()> run;
  if (kind == cudaMemcpyHostToDevice && is_pageable) {
    // Such memory is read before the call returns.
    const auto data =
        std::make_shared<std::string>(static_cast<const char*>(what.source), what.num_bytes);
    run = [what, data] { memcpy(alias(what.target), data->data(), what.num_bytes); };
  } else if (!is_pageable && kind != cudaMemcpyDeviceToDevice && !stream->capture &&
             !runs_at_once()) {
    run = watched(what, kind == cudaMemcpyHostToDevice ? what.source : what.target);
  } else {
    run = [what] { move(what.target, what.source, what.num_bytes); };
  }
  enqueue(stream, "copy", std::move(run));
  const bool host_waits = !what.is_async || (is_pageable && kind != cudaMemcpyHostToDevice);
  if (host_waits) wait_for({stream, stream->issued});
  return host_waits ? broken(stream->device) : cudaSuccess;
}

Status fill(const char* call, void* target, int value, size_t num_bytes, Stream* stream) {
  if (const char* reason = why_not(target, num_bytes)) {
    return refuse(cudaErrorInvalidValue, "%s of %zu bytes: %p %s", call, num_bytes, target, reason);
  }
  if (const Status status = refuse_implicit(stream, call)) return status;
  record_copy("fill", "fill bytes", num_bytes, stream);
  enqueue(stream, "fill", [=] { memset(alias(target), value, num_bytes); });
  return cudaSuccess;
}

}  // namespace driver
