// CUDA's runtime: devices and errors.
#include <stdio.h>
#include <string.h>

#include "graphs.h"
#include "memory.h"
#include "runtime.h"

using namespace driver;

namespace driver {

Status check_device(int device) {
  if (device >= 0 && device < settings().num_devices) return cudaSuccess;
  return refuse(cudaErrorInvalidDevice, "there is no gpu:%d", device);
}

}  // namespace driver

namespace {

int attribute(cudaDeviceAttr which) {
  switch (int(which)) {
    case cudaDevAttrMultiProcessorCount:
      return num_multiprocessors;
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
    // As with Linux's heterogeneous memory management; kernels run on the CPU.
    case cudaDevAttrPageableMemoryAccess:
      return 1;
    default:
      return 0;
  }
}

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
    properties->multiProcessorCount = num_multiprocessors;
    properties->l2CacheSize = 1 << 20;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
  }
  strcpy(properties->name, "a GPU of the stub driver");
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

}  // extern "C"
