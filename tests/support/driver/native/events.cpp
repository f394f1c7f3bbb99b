#include "events.h"

#include "graphs.h"

namespace driver {

namespace {

std::map<void*, std::unique_ptr<Event>> events;
uintptr_t last_event = 0x10000000;

}  // namespace

Event* find_event(void* handle) {
  const auto it = events.find(handle);
  return it == events.end() ? nullptr : it->second.get();
}

void* make_event(int device, unsigned flags) {
  auto event = std::make_unique<Event>();
  void* handle = reinterpret_cast<void*>(last_event += 16);
  event->handle = handle;
  event->device = device;
  event->flags = flags;
  events[handle] = std::move(event);
  return handle;
}

bool destroy_event(void* handle) {
  const auto it = events.find(handle);
  if (it == events.end()) return false;
  // A record that is queued still refers to it.
  static std::vector<std::unique_ptr<Event>> gone;
  gone.push_back(std::move(it->second));
  events.erase(it);
  // It may have been recorded on several streams, one after the other.
  bool is_anything_queued = false;
  for_each_stream([&](const Stream* stream) { is_anything_queued |= !stream->queue.empty(); });
  if (!is_anything_queued) gone.clear();
  return true;
}

void for_each_event(const std::function<void(Event*)>& visit) {
  for (const auto& [handle, event] : events) visit(event.get());
}

Status record_event(Event* event, Stream* stream) {
  if (event->device != stream->device) {
    return refuse(cudaErrorInvalidResourceHandle,
                  "an event of gpu:%d cannot be recorded on a stream of gpu:%d", event->device,
                  stream->device);
  }
  event->capture = stream->capture;
  if (stream->capture) {
    event->nodes = stream->capture->tails[stream->id];
    return cudaSuccess;
  }
  // Its number is fixed before it may run.
  enqueue(stream, "record", [event, stream, number = stream->issued + 1] {
    if (event->point.stream.get() == stream && event->point.number == number) {
      event->time = device_time();
    }
  });
  event->point = {stream, stream->issued};
  event->clock = stream->clock;
  if (is_done(event->point)) event->time = device_time();
  return cudaSuccess;
}

Status wait_event(Stream* stream, Event* event) {
  if (event->capture || is_capturing(stream)) return join_capture(stream, event);
  if (!event->point.stream) return cudaSuccess;
  join(stream->clock, event->clock);
  enqueue(stream, "wait", nullptr, {event->point});
  return cudaSuccess;
}

}  // namespace driver
