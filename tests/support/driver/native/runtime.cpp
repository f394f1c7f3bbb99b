// CUDA's runtime, which CuPy carries within itself: its functions are made to jump here.
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "copies.h"
#include "graphs.h"
#include "memory.h"

#undef cudaGetDeviceProperties
#undef cudaEventElapsedTime
#undef cudaGraphInstantiate

using namespace driver;

namespace {

#define REFUSE_IF(condition) \
  if (const Status status = condition) return status

Stream* stream_of(const char* call, void* handle, Status* status) {
  Stream* stream = find_stream(current_device(), handle);
  *status = stream ? broken(stream->device)
                   : refuse(cudaErrorInvalidResourceHandle, "%s: %p is no stream, or was destroyed",
                            call, handle);
  return stream;
}

Event* event_of(const char* call, void* handle, Status* status) {
  Event* event = find_event(handle);
  *status = event ? cudaSuccess
                  : refuse(cudaErrorInvalidResourceHandle, "%s: %p is no event, or was destroyed",
                           call, handle);
  return event;
}

#define STREAM(stream, handle)                                       \
  Status status_of_##stream;                                         \
  Stream* stream = stream_of(__func__, handle, &status_of_##stream); \
  REFUSE_IF(status_of_##stream)

#define EVENT(event, handle)                                     \
  Status status_of_##event;                                      \
  Event* event = event_of(__func__, handle, &status_of_##event); \
  REFUSE_IF(status_of_##event)

Status check_device(int device) {
  if (device >= 0 && device < settings().num_devices) return cudaSuccess;
  return refuse(cudaErrorInvalidDevice, "there is no gpu:%d", device);
}

int attribute(cudaDeviceAttr which) {
  switch (int(which)) {
    case cudaDevAttrMultiProcessorCount:
      return settings().multiprocessors;
    case cudaDevAttrComputeCapabilityMajor:
      return 9;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
      return 1;
    default:
      return 0;
  }
}

constexpr size_t total_memory = size_t(16) << 30;

}  // namespace

extern "C" {

// ---- Devices

cudaError_t cudaGetDevice(int* device) {
  const Call call(__func__);
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  const Call call(__func__);
  REFUSE_IF(check_device(device));
  set_current_device(device);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const Call call(__func__);
  *count = settings().num_devices;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  const Call call(__func__);
  REFUSE_IF(check_device(device));
  *value = attribute(which);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const Call call(__func__);
  REFUSE_IF(check_device(device));
  if (settings().cuda_version < 13000) {
    // CUDA 12 has another struct: this much is in the same place.
    memset(static_cast<void*>(properties), 0, offsetof(cudaDeviceProp, regsPerBlock));
  } else {
    *properties = {};
    properties->major = 9;
    properties->multiProcessorCount = settings().multiprocessors;
    properties->l2CacheSize = 1 << 20;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
  }
  strcpy(properties->name, "a GPU that is not there");
  properties->totalGlobalMem = total_memory;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  const Call call(__func__);
  REFUSE_IF(check_device(device));
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const Call call(__func__);
  *version = settings().cuda_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  const Call call(__func__);
  *version = settings().cuda_version;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  const Call call(__func__);
  REFUSE_IF(refuse_while_capturing(__func__));
  wait_for_device(current_device());
  return broken(current_device());
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  const Call call(__func__);
  REFUSE_IF(check_device(device));
  REFUSE_IF(check_device(peer));
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const Call call(__func__);
  REFUSE_IF(check_device(peer));
  if (is_peer_enabled(current_device(), peer)) {
    return refuse(cudaErrorPeerAccessAlreadyEnabled, "gpu:%d can access gpu:%d already",
                  current_device(), peer);
  }
  enable_peer(current_device(), peer);
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- Errors

const char* cudaGetErrorName(cudaError_t status) {
  switch (status) {
#define NAME(name) \
  case name:       \
    return #name;
    NAME(cudaSuccess)
    NAME(cudaErrorInvalidValue)
    NAME(cudaErrorMemoryAllocation)
    NAME(cudaErrorInvalidConfiguration)
    NAME(cudaErrorInvalidDevice)
    NAME(cudaErrorIllegalState)
    NAME(cudaErrorInvalidResourceHandle)
    NAME(cudaErrorNotReady)
    NAME(cudaErrorIllegalAddress)
    NAME(cudaErrorPeerAccessAlreadyEnabled)
    NAME(cudaErrorLaunchFailure)
    NAME(cudaErrorNotSupported)
    NAME(cudaErrorSymbolNotFound)
    NAME(cudaErrorStreamCaptureUnsupported)
    NAME(cudaErrorStreamCaptureInvalidated)
    NAME(cudaErrorStreamCaptureMerge)
    NAME(cudaErrorStreamCaptureUnmatched)
    NAME(cudaErrorStreamCaptureUnjoined)
    NAME(cudaErrorStreamCaptureIsolation)
    NAME(cudaErrorStreamCaptureImplicit)
    NAME(cudaErrorCapturedEvent)
#undef NAME
    default:
      return "cudaErrorUnknown";
  }
}

const char* cudaGetErrorString(cudaError_t status) {
  thread_local std::string text;
  text = last_reason(status);
  if (text.empty()) text = status == cudaErrorNotReady ? "device not ready" : "no reason was given";
  return text.c_str();
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

// Whatever is not here: the symbol's name is put into the first argument.
cudaError_t driver_unknown_function(const char* name) {
  const Call call("unknown");
  fprintf(stderr, "[driver] %s is not there\n", name);
  return refuse(cudaErrorNotSupported, "this driver has no %s", name);
}

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

// ---- Streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  const Call call("cudaStreamCreate");
  return make_stream(flags, reinterpret_cast<void**>(handle));
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithFlags(handle, 0); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int) {
  return cudaStreamCreateWithFlags(handle, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Call call(__func__);
  return destroy_stream(handle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Call call(__func__);
  STREAM(stream, handle);
  REFUSE_IF(refuse_if_captured(stream, __func__));
  REFUSE_IF(refuse_implicit(stream, __func__));
  wait_for_stream(stream);
  return broken(stream->device);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Call call(__func__);
  STREAM(stream, handle);
  REFUSE_IF(refuse_if_captured(stream, __func__));
  return query({stream, stream->issued});
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
  const Call call(__func__);
  STREAM(stream, stream_handle);
  EVENT(event, event_handle);
  return wait_event(stream, event);
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  const Call call(__func__);
  STREAM(stream, handle);
  *flags = stream->flags;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Call call(__func__);
  STREAM(stream, handle);
  *priority = 0;
  return cudaSuccess;
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Call call("cudaEventCreate");
  *event = static_cast<cudaEvent_t>(make_event(current_device(), flags));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Call call(__func__);
  EVENT(event, handle);
  destroy_event(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t stream_handle) {
  const Call call(__func__);
  STREAM(stream, stream_handle);
  EVENT(event, event_handle);
  return record_event(event, stream);
}

static Status refuse_captured_event(const Event& event, const char* call) {
  if (!event.capture) return cudaSuccess;
  return refuse(cudaErrorCapturedEvent, "%s: the event was recorded on a stream that was captured",
                call);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Call call(__func__);
  EVENT(event, handle);
  REFUSE_IF(refuse_captured_event(*event, __func__));
  REFUSE_IF(broken(event->device));
  return query(event->point);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const Call call(__func__);
  EVENT(event, handle);
  REFUSE_IF(refuse_captured_event(*event, __func__));
  wait_for(event->point);
  return broken(event->device);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin_handle,
                                 cudaEvent_t end_handle) {
  const Call call(__func__);
  EVENT(begin, begin_handle);
  EVENT(end, end_handle);
  if (begin->device != end->device || !begin->point.stream || !end->point.stream ||
      ((begin->flags | end->flags) & cudaEventDisableTiming)) {
    return refuse(cudaErrorInvalidResourceHandle,
                  "%s: both events must be recorded on one device, and take the time", __func__);
  }
  if (!is_done(begin->point) || !is_done(end->point)) return cudaErrorNotReady;
  *milliseconds = float(1e-6 * double(end->time - begin->time));
  return cudaSuccess;
}

// ---- Capture and graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Call call(__func__);
  STREAM(stream, handle);
  return begin_capture(stream, mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Call call(__func__);
  STREAM(stream, handle);
  return end_capture(stream, reinterpret_cast<void**>(graph));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Call call(__func__);
  STREAM(stream, handle);
  REFUSE_IF(refuse_implicit(stream, __func__));
  *status = !stream->capture                       ? cudaStreamCaptureStatusNone
            : stream->capture->invalidated.empty() ? cudaStreamCaptureStatusActive
                                                   : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  const Call call(__func__);
  return instantiate(graph, reinterpret_cast<void**>(executable));
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
  const Call call(__func__);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const Call call(__func__);
  STREAM(stream, handle);
  return launch_graph(executable, stream);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const Call call(__func__);
  return destroy_graph(graph);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const Call call(__func__);
  return destroy_graph(executable);
}

}  // extern "C"
