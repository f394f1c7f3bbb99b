// Streams that run late: a queue of operations each, and a policy that chooses who runs next.
#pragma once

#include <deque>
#include <memory>

#include "clocks.h"

namespace driver {

struct Graph;

struct Operation {
  uint64_t serial;
  const char* what;
  std::vector<Point> after;
  std::function<void()> run;
  // What it waits for besides: other processes and threads. Null if nothing.
  std::function<bool()> is_ready;
};

struct Stream : std::enable_shared_from_this<Stream> {
  uint64_t id;  // never given again; 0 if the stream is forgotten
  void* handle;
  int device;
  unsigned flags;
  bool is_default;  // the legacy one
  bool is_destroyed = false;
  uint64_t issued = 0;
  uint64_t done = 0;
  uint64_t joining =
      0;  // the last operation that others wait for by the rules of the legacy stream
  std::deque<Operation> queue;
  Clock clock;
  std::shared_ptr<Graph> capture;  // while it is captured
  bool is_blocking() const { return !is_default && !(flags & cudaStreamNonBlocking); }
};

enum class Policy { immediate, oldest, newest, random, nothing };
void set_policy(Policy policy, uint64_t seed);
Policy policy();
// Whether operations are run as they are enqueued.
bool runs_at_once();

// Returns null for a handle that is not, or no longer, a stream's.
Stream* find_stream(int device, void* handle);
Status make_stream(unsigned flags, void** handle);
Status destroy_stream(void* handle);

// Adds an operation of the program: by CUDA's rules, the legacy stream and blocking ones wait for
// each other. In a stream that is captured, it becomes a node of the graph.
void enqueue(Stream* stream, const char* what, std::function<void()> run,
             std::vector<Point> after = {});
// Adds an operation that waits for other threads or processes, too, and which the host does not
// wait for in this call; not in a stream that is captured.
void enqueue_waiting(Stream* stream, const char* what, std::function<void()> run,
                     std::function<bool()> is_ready, std::vector<Point> after = {});
// Adds an operation of the driver's own, for which no other stream waits.
void enqueue_own(Stream* stream, const char* what, std::function<void()> run);

// These run what has to be run, and whatever else the policy likes.
void wait_for(Point point);
void wait_for_stream(Stream* stream);
void wait_for_device(int device);
void wait_for_everything();

bool is_done(const Point& point);
// Says no while the program asks, but not for ever.
Status query(Point point);

// Whether the program may rely on an operation to be done before whatever it enqueues next.
bool precedes(uint64_t stream_id, uint64_t number, Stream* next);
// How many streams there are, and entries in clocks: every call looks at some of them.
size_t num_remembered();

bool is_capturing(const Stream* stream);
void for_each_stream(const std::function<void(Stream*)>& visit);
uint64_t random_number();

// A device's clock, in nanoseconds. Kernels that wait for it make it go faster.
int64_t device_time();
void advance_device_time(int64_t by);

}  // namespace driver
