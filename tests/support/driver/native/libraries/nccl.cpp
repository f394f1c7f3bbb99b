// NCCL: collectives of threads and processes, each on a device of its own.
//
// A collective is two operations of its stream: the rank arrives, with what it sends; and, when all
// ranks have arrived, it takes what it receives. So it is done on no rank before all streams have
// reached it, what is sent is read as early as it may be, and results come as late.
#include <stdio.h>
#include <unistd.h>

#include "libraries/nccl_calls.h"

using driver::Call;
using driver::report;
using nccl::Kind;

struct UniqueId {
  char bytes[128];
};

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22707;
  return nccl::success;
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case nccl::success:
      return "no error";
    case nccl::system_error:
      return "unhandled system error";
    case nccl::invalid_argument:
      return "invalid argument";
    case nccl::invalid_usage:
      return "invalid usage";
    case nccl::remote_error:
      return "remote process exited or there was a network error";
    default:
      return "unknown result code";
  }
}

int ncclGetUniqueId(UniqueId* id) {
  const Call call(__func__);
  static int number = 0;
  *id = {};
  snprintf(id->bytes, sizeof id->bytes, "%d-%d-%ld", getpid(), ++number, long(1e9 * nccl::now_s()));
  return nccl::success;
}

int ncclCommInitRankConfig(void** handle, int size, UniqueId id, int rank, void*) {
  const nccl::Result result =
      nccl::start(__func__, handle, size, id.bytes, rank, driver::current_device());
  return result || nccl::group_depth() ? result : nccl::end_group();
}

int ncclCommInitAll(void** handles, int size, const int* devices) {
  UniqueId id;
  ncclGetUniqueId(&id);
  ++nccl::group_depth();
  nccl::Result result = nccl::success;
  for (int rank = 0; rank < size && !result; ++rank) {
    const int device = devices ? devices[rank] : rank;
    result = nccl::start(__func__, handles + rank, size, id.bytes, rank, device);
  }
  --nccl::group_depth();
  return result ? result : nccl::end_group();
}

int ncclCommDestroy(void* handle) { return nccl::end(__func__, handle, false); }
int ncclCommAbort(void* handle) { return nccl::end(__func__, handle, true); }

int ncclCommGetAsyncError(void* handle, int* error) {
  const Call call(__func__);
  const auto comm = nccl::find(__func__, handle);
  if (!comm) return nccl::invalid_argument;
  *error = comm->ranks->has_lost_one(comm->rank) ? nccl::remote_error : nccl::success;
  return nccl::success;
}

int ncclCommCount(void* handle, int* count) {
  const Call call(__func__);
  const auto comm = nccl::find(__func__, handle);
  if (comm) *count = comm->size;
  return comm ? nccl::success : nccl::invalid_argument;
}

int ncclCommCuDevice(void* handle, int* device) {
  const Call call(__func__);
  const auto comm = nccl::find(__func__, handle);
  if (comm) *device = comm->device;
  return comm ? nccl::success : nccl::invalid_argument;
}

int ncclCommUserRank(void* handle, int* rank) {
  const Call call(__func__);
  const auto comm = nccl::find(__func__, handle);
  if (comm) *rank = comm->rank;
  return comm ? nccl::success : nccl::invalid_argument;
}

int ncclGroupStart() {
  ++nccl::group_depth();
  return nccl::success;
}

int ncclGroupEnd() {
  if (!nccl::group_depth()) {
    const Call call(__func__);
    report("%s: no group was started", __func__);
    return nccl::invalid_usage;
  }
  return --nccl::group_depth() ? nccl::success : nccl::end_group();
}

int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, void* comm,
                  void* stream) {
  return nccl::add(__func__, comm, stream, {Kind::all_reduce, type, op, 0, count}, send, receive);
}

int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root,
               void* comm, void* stream) {
  return nccl::add(__func__, comm, stream, {Kind::reduce, type, op, root, count}, send, receive);
}

int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* comm,
                  void* stream) {
  return nccl::add(__func__, comm, stream, {Kind::broadcast, type, 0, root, count}, send, receive);
}

int ncclBcast(void* buffer, size_t count, int type, int root, void* comm, void* stream) {
  return nccl::add(__func__, comm, stream, {Kind::broadcast, type, 0, root, count}, buffer, buffer);
}

int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm,
                  void* stream) {
  return nccl::add(__func__, comm, stream, {Kind::all_gather, type, 0, 0, count}, send, receive);
}

int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, void* comm,
                      void* stream) {
  return nccl::add(__func__, comm, stream, {Kind::reduce_scatter, type, op, 0, count}, send,
                   receive);
}

}  // extern "C"
