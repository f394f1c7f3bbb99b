// CUDA's runtime: streams, events, capture and graphs.
#include "graphs.h"
#include "runtime.h"

using namespace driver;

namespace driver {

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

}  // namespace driver

extern "C" {

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
