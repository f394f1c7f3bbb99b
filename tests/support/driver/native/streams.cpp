#include "streams.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "events.h"
#include "graphs.h"
#include "memory.h"

namespace driver {

namespace {

// As on a GPU, whose queues are full some time.
constexpr size_t most_queued = 1024;
// Of so many questions whether something is done, one waits for it: the host may ask until it is.
constexpr unsigned patience = 64;

Policy chosen = Policy::immediate;
uint64_t random_state = 1;
uint64_t last_serial = 0;
int64_t time_gained = 0;
unsigned num_questions = 0;
bool is_running = false;
// Then whatever other ranks were to do will not be done.
constexpr auto longest_wait = std::chrono::seconds(60);

// All that are not forgotten, in the order in which they were made.
std::vector<std::shared_ptr<Stream>> streams;
// Those that are destroyed, and whose handles nobody has got since.
std::vector<std::shared_ptr<Stream>> without_heir;
std::map<void*, Stream*> by_handle;
// The legacy stream of each device, and each thread's own.
std::map<std::pair<int, uint64_t>, Stream*> defaults;
Clock host;
uintptr_t last_stream = 0x1000;
uint64_t last_id = 0;

void for_each_clock(const std::function<void(Clock&)>& visit) {
  visit(host);
  for (const auto& stream : streams) visit(stream->clock);
  for_each_event([&](Event* event) { visit(event->clock); });
}

// Forgets streams that are destroyed, if the host knows that they are done: whatever is enqueued
// from now on follows them. Called when the host has learned something.
void forget_streams() {
  std::vector<uint64_t> forgotten;
  for (const auto& stream : streams) {
    if (!stream->is_destroyed || !stream->queue.empty()) continue;
    if (stream->issued && !holds(host, stream->id, stream->issued)) continue;
    join(host, stream->clock);
    stream->clock.clear();
    forgotten.push_back(std::exchange(stream->id, 0));
  }
  if (forgotten.empty()) return;
  std::erase_if(streams, [](const auto& stream) { return !stream->id; });
  for_each_clock([&](Clock& clock) {
    for (uint64_t id : forgotten) clock.erase(id);
  });
}

void remember(std::shared_ptr<Stream> stream) {
  stream->id = ++last_id;
  streams.push_back(std::move(stream));
}

Stream* new_stream(void* handle, int device, unsigned flags, bool is_default) {
  auto stream = std::make_shared<Stream>();
  stream->handle = handle;
  stream->device = device;
  stream->flags = flags;
  stream->is_default = is_default;
  remember(stream);
  return stream.get();
}

Stream* default_stream(int device, uint64_t thread) {
  Stream*& stream = defaults[{device, thread}];
  if (!stream) {
    void* handle = thread ? cudaStreamPerThread : nullptr;
    stream = new_stream(handle, device, 0, thread == 0);
  }
  return stream;
}

// Whether nothing of this process keeps a stream's next operation from running.
bool has_next(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const auto& after = stream.queue.front().after;
  return std::all_of(after.begin(), after.end(), is_done);
}

bool can_run(const Stream& stream) {
  if (!has_next(stream)) return false;
  const auto& is_ready = stream.queue.front().is_ready;
  return !is_ready || is_ready();
}

// Returns a stream whose next operation waits for other threads or processes.
Stream* waits_for_others() {
  const auto it = std::find_if(streams.begin(), streams.end(),
                               [](const auto& stream) { return has_next(*stream); });
  return it == streams.end() ? nullptr : it->get();
}

Stream* choose() {
  Stream* best = nullptr;
  uint64_t num_candidates = 0;
  for (const auto& stream : streams) {
    if (!can_run(*stream)) continue;
    const uint64_t serial = stream->queue.front().serial;
    bool is_better = !best;
    if (best && chosen == Policy::newest) is_better = serial > best->queue.front().serial;
    if (best && chosen != Policy::newest) is_better = serial < best->queue.front().serial;
    if (chosen == Policy::random) is_better = random_number() % ++num_candidates == 0;
    if (is_better) best = stream.get();
  }
  return best;
}

bool run_one() {
  if (is_running) return false;
  Stream* stream = choose();
  if (!stream) return false;
  is_running = true;
  Operation operation = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (operation.run) operation.run();
  ++stream->done;
  is_running = false;
  return true;
}

// Runs operations until the condition holds. If those that are left wait for other threads or
// processes, so does the host, or goes on if it is not to wait.
template <class Condition>
void run_until(Condition condition, bool waits = true) {
  const auto began = std::chrono::steady_clock::now();
  while (!condition()) {
    if (run_one()) continue;
    Stream* stream = is_running ? nullptr : waits_for_others();
    if (!stream) {
      report("deadlock: streams wait for each other");
      break;
    }
    if (!waits) break;
    if (std::chrono::steady_clock::now() - began > longest_wait) {
      report("deadlock: %s waits for other ranks", stream->queue.front().what);
      break;
    }
    lock_memory();
    lock().pause();
  }
  if (!is_running) lock_memory();
}

void push(Stream* stream, const char* what, std::function<void()> run, std::vector<Point> after,
          std::function<bool()> is_ready) {
  // Memory may be freed on a stream that is long forgotten.
  if (!stream->id) remember(stream->shared_from_this());
  for (const Point& point : after) join(stream->clock, point);
  join(stream->clock, host);
  after.erase(std::remove_if(after.begin(), after.end(), is_done), after.end());
  stream->queue.push_back(
      {++last_serial, what, std::move(after), std::move(run), std::move(is_ready)});
  stream->clock[stream->id] = ++stream->issued;
}

void add(Stream* stream, const char* what, std::function<void()> run, std::vector<Point> after) {
  push(stream, what, std::move(run), std::move(after), nullptr);
  if (runs_at_once()) {
    wait_for({stream, stream->issued});
  } else {
    run_until([stream] { return stream->queue.size() < most_queued; }, false);
  }
}

// An operation of the legacy stream follows all that was enqueued before on blocking streams, and
// theirs follow it.
std::vector<Point> joined(Stream* stream) {
  std::vector<Point> after;
  const auto follow = [&](Stream* other) {
    if (other->issued) {
      after.push_back({other, other->joining});
      join(stream->clock, other->clock);
    }
  };
  if (stream->is_default) {
    for (const auto& other : streams) {
      if (other->device == stream->device && other->is_blocking()) follow(other.get());
    }
  } else if (stream->is_blocking()) {
    follow(default_stream(stream->device, 0));
  }
  return after;
}

}  // namespace

uint64_t random_number() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state >> 11;
}

void set_policy(Policy policy, uint64_t seed) {
  wait_for_everything();
  chosen = policy;
  random_state = (seed + 1) * 0x9E3779B97F4A7C15ull;
}

Policy policy() { return chosen; }
bool runs_at_once() { return chosen == Policy::immediate || chosen == Policy::nothing; }

Stream* find_stream(int device, void* handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return default_stream(device, 0);
  if (handle == cudaStreamPerThread) return default_stream(device, uint64_t(pthread_self()));
  const auto it = by_handle.find(handle);
  return it == by_handle.end() ? nullptr : it->second;
}

Status make_stream(unsigned flags, void** handle) {
  const int device = current_device();
  // A handle is given again as soon as its stream is gone and done; the last one first, as memory
  // is.
  const auto it = std::find_if(without_heir.rbegin(), without_heir.rend(), [=](const auto& stream) {
    return stream->queue.empty() && stream->device == device && stream->flags == flags;
  });
  if (it == without_heir.rend()) {
    *handle = reinterpret_cast<void*>(last_stream += 16);
    by_handle[*handle] = new_stream(*handle, device, flags, false);
    return cudaSuccess;
  }
  const std::shared_ptr<Stream> gone = *it;
  without_heir.erase(std::prev(it.base()));
  *handle = gone->handle;
  Stream* const heir = by_handle[*handle] = new_stream(*handle, device, flags, false);
  parts_inherited(gone.get(), heir);
  return cudaSuccess;
}

Status destroy_stream(void* handle) {
  const auto it = by_handle.find(handle);
  if (it == by_handle.end()) {
    return refuse(cudaErrorInvalidResourceHandle, "%p is no stream", handle);
  }
  it->second->is_destroyed = true;
  it->second->capture = nullptr;
  without_heir.push_back(it->second->shared_from_this());
  by_handle.erase(it);
  forget_streams();
  return cudaSuccess;
}

void enqueue(Stream* stream, const char* what, std::function<void()> run,
             std::vector<Point> after) {
  if (is_capturing(stream)) return add_node(stream, std::move(run));
  for (const Point& point : joined(stream)) after.push_back(point);
  add(stream, what, std::move(run), std::move(after));
  stream->joining = stream->issued;
}

void enqueue_waiting(Stream* stream, const char* what, std::function<void()> run,
                     std::function<bool()> is_ready, std::vector<Point> after) {
  for (const Point& point : joined(stream)) after.push_back(point);
  push(stream, what, std::move(run), std::move(after), std::move(is_ready));
  stream->joining = stream->issued;
}

void enqueue_own(Stream* stream, const char* what, std::function<void()> run) {
  add(stream, what, std::move(run), joined(stream));
}

bool is_done(const Point& point) { return !point.stream || point.stream->done >= point.number; }

void wait_for(Point point) {
  run_until([&] { return is_done(point); });
  join(host, point);
  forget_streams();
}

void wait_for_stream(Stream* stream) {
  const auto kept = stream->shared_from_this();  // while other threads go on
  for (const Point& point : joined(stream)) wait_for(point);
  wait_for({stream, stream->issued});
  join(host, stream->clock);
  forget_streams();
}

void wait_for_device(int device) {
  num_questions = 0;  // so that what a test asks next does not depend on the tests before
  run_until([=] {
    return std::all_of(streams.begin(), streams.end(), [=](const auto& stream) {
      return stream->device != device || stream->queue.empty();
    });
  });
  for (const auto& stream : streams) {
    if (stream->device == device) join(host, stream->clock);
  }
  forget_streams();
}

void wait_for_everything() {
  for (int device = 0; device < settings().num_devices; ++device) wait_for_device(device);
}

Status query(Point point) {
  if (!is_done(point) && ++num_questions % patience == 0) {
    // Who asks may hold a lock that another thread needs on its way to a collective.
    run_until([&] { return is_done(point); }, false);
  }
  if (!is_done(point)) return cudaErrorNotReady;
  join(host, point);
  forget_streams();
  return cudaSuccess;
}

bool precedes(uint64_t id, uint64_t number, Stream* next) {
  const bool is_forgotten = std::none_of(streams.begin(), streams.end(),
                                         [=](const auto& stream) { return stream->id == id; });
  if (is_forgotten || holds(host, id, number) || holds(next->clock, id, number)) return true;
  Clock joined_clock;
  if (next->is_default) {
    for (const auto& other : streams) {
      if (other->device == next->device && other->is_blocking()) join(joined_clock, other->clock);
    }
  } else if (next->is_blocking()) {
    joined_clock = default_stream(next->device, 0)->clock;
  }
  return holds(joined_clock, id, number);
}

size_t num_remembered() {
  size_t number = streams.size();
  for_each_clock([&](const Clock& clock) { number += clock.size(); });
  return number;
}

int64_t device_time() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec + time_gained;
}

void advance_device_time(int64_t by) { time_gained += by; }

bool is_capturing(const Stream* stream) { return stream->capture != nullptr; }

void for_each_stream(const std::function<void(Stream*)>& visit) {
  for (const auto& stream : streams) visit(stream.get());
}

}  // namespace driver
