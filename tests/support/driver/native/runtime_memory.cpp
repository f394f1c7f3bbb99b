// CUDA's runtime: memory and copies.
#include "copies.h"
#include "graphs.h"
#include "memory.h"
#include "runtime.h"

using namespace driver;

extern "C" {

// ---- Memory

cudaError_t cudaMalloc(void** at, size_t num_bytes) {
  const Call call(__func__);
  REFUSE_IF(broken(current_device()));
  REFUSE_IF(refuse_while_capturing(__func__));
  return allocate(current_device(), num_bytes, at);
}

cudaError_t cudaFree(void* at) {
  const Call call(__func__);
  if (!at) return cudaSuccess;
  REFUSE_IF(refuse_while_capturing(__func__));
  const Place place = find_place(at);
  if (place.kind == Kind::device) wait_for_device(place.device);
  return release(at);
}

cudaError_t cudaHostAlloc(void** at, size_t num_bytes, unsigned) {
  const Call call(__func__);
  REFUSE_IF(refuse_while_capturing(__func__));
  return lock_pages(num_bytes, at);
}

cudaError_t cudaMallocHost(void** at, size_t num_bytes) { return cudaHostAlloc(at, num_bytes, 0); }

cudaError_t cudaFreeHost(void* at) {
  const Call call(__func__);
  wait_for_everything();
  return unlock_pages(at);
}

cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  const Call call(__func__);
  make_context_current();
  *total = total_memory;
  *unused = total_memory - used_bytes(current_device());
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  const Call call(__func__);
  const Place place = find_place(at);
  *attributes = {};
  attributes->device = place.kind == Kind::device ? place.device : current_device();
  if (place.kind == Kind::pageable) {
    attributes->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
  }
  if (const char* reason = why_not(at, 1); reason && place.kind == Kind::device) {
    return refuse(cudaErrorInvalidValue, "%s: %p %s", __func__, at, reason);
  }
  attributes->type = place.kind == Kind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->devicePointer = const_cast<void*>(at);
  if (place.kind == Kind::page_locked) attributes->hostPointer = const_cast<void*>(at);
  return cudaSuccess;
}

// ---- Copies

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t num_bytes, cudaMemcpyKind kind,
                            cudaStream_t handle) {
  const Call call(__func__);
  STREAM(stream, handle);
  return copy({__func__, target, source, num_bytes, kind}, stream);
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t num_bytes, cudaMemcpyKind kind) {
  const Call call(__func__);
  STREAM(stream, nullptr);
  return copy({__func__, target, source, num_bytes, kind, false}, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int target_device, const void* source,
                                int source_device, size_t num_bytes, cudaStream_t handle) {
  const Call call(__func__);
  STREAM(stream, handle);
  if (num_bytes &&
      (find_place(target).device != target_device || find_place(source).device != source_device)) {
    return refuse(cudaErrorInvalidValue,
                  "%s says gpu:%d to gpu:%d; the memory is that of gpu:%d and gpu:%d", __func__,
                  source_device, target_device, find_place(source).device,
                  find_place(target).device);
  }
  return copy({__func__, target, source, num_bytes}, stream);
}

cudaError_t cudaMemcpyPeer(void* target, int target_device, const void* source, int source_device,
                           size_t num_bytes) {
  // By CUDA's documentation it is ordered with all earlier work of both devices.
  const std::lock_guard held(lock());
  for (int device : {target_device, source_device}) {
    REFUSE_IF(check_device(device));
    wait_for_stream(find_stream(device, nullptr));
  }
  const Status status =
      cudaMemcpyPeerAsync(target, target_device, source, source_device, num_bytes, nullptr);
  wait_for_stream(find_stream(current_device(), nullptr));
  return status;
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t num_bytes, cudaStream_t handle) {
  const Call call(__func__);
  STREAM(stream, handle);
  return fill(__func__, target, value, num_bytes, stream);
}

cudaError_t cudaMemset(void* target, int value, size_t num_bytes) {
  const Call call(__func__);
  STREAM(stream, nullptr);
  return fill(__func__, target, value, num_bytes, stream);
}

}  // extern "C"
