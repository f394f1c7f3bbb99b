#include "libraries/nccl_calls.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "graphs.h"
#include "launches.h"
#include "libraries/nccl_values.h"
#include "memory.h"

using namespace driver;

namespace nccl {

namespace {

constexpr double longest_start_s = 60;

// A call with its buffers; `send` is read and `receive` written as far as the rank takes part.
struct Buffers {
  Call call;
  const char* send = nullptr;
  size_t send_bytes = 0;
  char* receive = nullptr;
  size_t receive_bytes = 0;
};

struct Collective {
  std::shared_ptr<Stream> stream;
  std::vector<Buffers> calls;
};

struct Group {
  int depth = 0;
  Result result = success;
  std::vector<std::shared_ptr<Comm>> starting;
  std::vector<std::pair<std::shared_ptr<Comm>, Collective>> collectives;
};

std::map<void*, std::shared_ptr<Comm>> comms;
thread_local Group group;

const char* why_not_on(int device, const void* at, size_t num_bytes) {
  if (const char* reason = why_not(at, num_bytes)) return reason;
  if (!num_bytes) return nullptr;
  const Place place = find_place(at);
  if (place.kind != driver::Kind::device) return "is in host memory";
  return place.device == device ? nullptr : "is in another device's memory";
}

Result check(const char* name, const Comm& comm, const Buffers& buffers, const Stream* stream) {
  const Call& call = buffers.call;
  if (call.type < 0 || call.type >= num_types || call.op < 0 || call.op >= num_ops ||
      call.root < 0 || call.root >= comm.size) {
    report("%s: type %d, operation %d, root %d of %d ranks", name, call.type, call.op, call.root,
           comm.size);
    return invalid_argument;
  }
  if (!stream || stream->device != comm.device) {
    report("%s: the communicator is of gpu:%d, the stream of gpu:%d", name, comm.device,
           stream ? stream->device : -1);
    return invalid_usage;
  }
  if (is_capturing(stream)) {
    report("%s: the stand-in cannot be captured", name);
    return invalid_usage;
  }
  const std::pair<const void*, size_t> operands[] = {{buffers.send, buffers.send_bytes},
                                                     {buffers.receive, buffers.receive_bytes}};
  for (const auto& [at, num_bytes] : operands) {
    if (const char* reason = why_not_on(comm.device, at, num_bytes)) {
      report("%s: %p %s", name, at, reason);
      return invalid_argument;
    }
  }
  return success;
}

// What the rank has got, from what all have sent; null if their calls do not match.
const char* why_not_matching(const Comm& comm, uint64_t number, const std::vector<Buffers>& mine) {
  for (int rank = 0; rank < comm.size; ++rank) {
    const std::vector<Call> theirs = comm.ranks->calls(rank, number);
    if (theirs.size() != mine.size()) return "the ranks make different numbers of calls";
    for (size_t i = 0; i < mine.size(); ++i) {
      if (memcmp(&theirs[i], &mine[i].call, sizeof(Call))) return "the ranks make different calls";
    }
  }
  return nullptr;
}

size_t sent_bytes(const Call& call, int rank, int size) {
  const size_t num_bytes = call.count * item_size[call.type];
  if (call.kind == Kind::broadcast) return rank == call.root ? num_bytes : 0;
  return call.kind == Kind::reduce_scatter ? num_bytes * size : num_bytes;
}

void arrive(const Comm& comm, uint64_t number, const std::vector<Buffers>& all) {
  std::vector<Call> calls;
  size_t total = 0;
  for (const Buffers& buffers : all) {
    calls.push_back(buffers.call);
    total += sizeof(Call) + buffers.send_bytes;
  }
  if (total + 128 > most_bytes) {
    report("a rank sends %zu bytes in one collective; the stand-in allows %zu", total, most_bytes);
    return;
  }
  char* to = comm.ranks->begin(comm.rank, number, calls);
  for (const Buffers& buffers : all) {
    if (buffers.send_bytes) memcpy(to, alias(buffers.send), buffers.send_bytes);
    to += buffers.send_bytes;
  }
  comm.ranks->arrive(comm.rank, number);
}

void take(const Comm& comm, uint64_t number, const std::vector<Buffers>& all) {
  if (const char* reason = why_not_matching(comm, number, all)) {
    report("NCCL's collective %lu on rank %d: %s", number, comm.rank, reason);
    return;
  }
  std::vector<const char*> sent;
  for (int rank = 0; rank < comm.size; ++rank) sent.push_back(comm.ranks->bytes(rank, number));
  for (const Buffers& buffers : all) {
    const Call& call = buffers.call;
    const size_t num_bytes = call.count * item_size[call.type];
    char* const to = buffers.receive_bytes ? alias(buffers.receive) : nullptr;
    if (to && call.kind == Kind::broadcast) {
      memcpy(to, sent[call.root], num_bytes);
    } else if (to && call.kind == Kind::all_gather) {
      for (int rank = 0; rank < comm.size; ++rank) {
        memcpy(to + rank * num_bytes, sent[rank], num_bytes);
      }
    } else if (to) {
      const bool scatters = call.kind == Kind::reduce_scatter;
      std::vector<const char*> from = sent;
      if (scatters) {
        for (const char*& bytes : from) bytes += comm.rank * num_bytes;
      }
      reduce(call.type, call.op, from, call.count, to);
    }
    for (int rank = 0; rank < comm.size; ++rank) sent[rank] += sent_bytes(call, rank, comm.size);
  }
}

// What nobody computes any more is not to look like a result.
void spoil(const std::vector<Buffers>& all) {
  for (const Buffers& buffers : all) {
    if (buffers.receive_bytes) memset(alias(buffers.receive), poison, buffers.receive_bytes);
  }
}

// Enqueues the collectives of a group: first all ranks of this thread arrive, then any of them
// waits for the others.
void enqueue_all(const std::vector<std::pair<std::shared_ptr<Comm>, Collective>>& collectives) {
  for (const auto& [comm, collective] : collectives) {
    const uint64_t number = ++comm->issued;
    Stream* const stream = collective.stream.get();
    record_launch("library", "nccl", dim3(0, 0, 0), dim3(0, 0, 0), 0, "", 0, stream);
    // One collective of a communicator follows the other, on whatever streams.
    std::vector<Point> after;
    if (comm->last.stream) after.push_back(comm->last);
    enqueue_waiting(
        stream, "the beginning of NCCL's collective",
        [comm = comm, number, calls = collective.calls] {
          if (!comm->is_aborted) arrive(*comm, number, calls);
        },
        nullptr, after);
    enqueue_waiting(
        stream, "NCCL's collective",
        [comm = comm, number, calls = collective.calls] {
          comm->is_aborted ? spoil(calls) : take(*comm, number, calls);
        },
        [comm = comm, number] {
          return comm->is_aborted || comm->ranks->all_have_arrived(number);
        });
    comm->last = {stream, stream->issued};
  }
  if (!runs_at_once()) return;
  for (const auto& [comm, collective] : collectives) wait_for(comm->last);
}

// Waits, without the driver's lock, until `has_come` says so of all.
template <class HasCome>
Result wait_for_others(const std::vector<std::shared_ptr<Comm>>& waiting, HasCome has_come) {
  const double began = now_s();
  for (const auto& comm : waiting) {
    while (!has_come(*comm->ranks)) {
      if (comm->is_aborted || now_s() - began > longest_start_s) return system_error;
      usleep(200);
    }
  }
  return success;
}

Result wait_for_start(const std::vector<std::shared_ptr<Comm>>& starting) {
  const auto has_come = [](const Ranks& ranks) { return ranks.all_have_joined(); };
  if (const Result result = wait_for_others(starting, has_come)) return result;
  for (const auto& comm : starting) {
    if (comm->ranks->share_a_device()) return invalid_usage;
  }
  return success;
}

// A communicator's first collective keeps the host until all ranks have called it.
Result wait_for_connections(
    const std::vector<std::pair<std::shared_ptr<Comm>, Collective>>& collectives) {
  std::vector<std::shared_ptr<Comm>> first;
  for (const auto& [comm, collective] : collectives) {
    if (!comm->issued) first.push_back(comm);
  }
  for (const auto& comm : first) comm->ranks->connect();
  return wait_for_others(first, [](const Ranks& ranks) { return ranks.all_have_connected(); });
}

}  // namespace

double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

std::shared_ptr<Comm> find(const char* name, void* handle) {
  const auto it = comms.find(handle);
  if (it != comms.end()) return it->second;
  if (handle) report("%s: %p is no communicator, or was destroyed", name, handle);
  return nullptr;
}

int& group_depth() { return group.depth; }

Result end_group() {
  Group ended;
  std::swap(ended, group);
  if (ended.result) return ended.result;
  if (const Result result = wait_for_start(ended.starting)) return result;
  if (const Result result = wait_for_connections(ended.collectives)) return result;
  const std::lock_guard held(lock());
  enqueue_all(ended.collectives);
  return success;
}

Result start(const char* name, void** handle, int size, const char* identity, int rank,
             int device) {
  const driver::Call counted(name);
  *handle = nullptr;
  if (size < 1 || size > most_ranks || rank < 0 || rank >= size) return invalid_argument;
  auto comm = std::make_shared<Comm>();
  comm->ranks = Ranks::open(identity, size);
  comm->rank = rank;
  comm->size = size;
  comm->device = device;
  if (!comm->ranks || !comm->ranks->join(rank, device)) {
    report("%s: rank %d of %d is there already, or the ranks disagree on their number", name, rank,
           size);
    return invalid_argument;
  }
  *handle = comm.get();
  comms[comm.get()] = comm;
  group.starting.push_back(comm);
  return success;
}

Result add(const char* name, void* handle, void* stream_handle, Call call, const void* send,
           void* receive) {
  {
    const driver::Call counted(name);
    const auto comm = find(name, handle);
    if (!comm) return invalid_argument;
    Stream* const stream = find_stream(comm->device, stream_handle);
    const bool is_root = comm->rank == call.root;
    Buffers buffers{call};
    if (call.type >= 0 && call.type < num_types) {
      const size_t num_bytes = call.count * item_size[call.type];
      buffers.send_bytes = sent_bytes(call, comm->rank, comm->size);
      const bool receives = call.kind != Kind::reduce || is_root;
      buffers.receive_bytes =
          receives ? num_bytes * (call.kind == Kind::all_gather ? comm->size : 1) : 0;
    }
    buffers.send = static_cast<const char*>(send);
    buffers.receive = static_cast<char*>(receive);
    if (const Result result = check(name, *comm, buffers, stream)) {
      return group.depth ? group.result = result : result;
    }
    auto& all = group.collectives;
    const auto of_comm =
        std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.first == comm; });
    if (of_comm == all.end()) {
      all.push_back({comm, {stream->shared_from_this(), {buffers}}});
    } else if (of_comm->second.stream.get() == stream) {
      of_comm->second.calls.push_back(buffers);
    } else {
      report("%s: a group has collectives of one communicator on two streams", name);
      return group.result = invalid_usage;
    }
  }
  return group.depth ? success : end_group();
}

Result end(const char* name, void* handle, bool is_abort) {
  const driver::Call counted(name);
  const auto comm = find(name, handle);
  if (!comm) return invalid_argument;
  if (!is_abort && !is_done(comm->last)) {
    report("%s: a collective of rank %d is still in flight", name, comm->rank);
  }
  comm->is_aborted = true;
  comms.erase(handle);
  return success;
}

}  // namespace nccl
