// Events: points of streams that other streams and the host wait for.
#pragma once

#include "streams.h"

namespace driver {

struct Event {
  void* handle;
  int device;
  unsigned flags;
  Point point;  // where it was recorded last
  Clock clock;
  std::shared_ptr<Graph> capture;  // recorded in a stream that was captured
  std::vector<size_t> nodes;       // the last ones before it
  int64_t time = 0;                // on the device's clock
};

// Returns null for a handle that is not, or no longer, an event's.
Event* find_event(void* handle);
void* make_event(int device, unsigned flags);
bool destroy_event(void* handle);
void for_each_event(const std::function<void(Event*)>& visit);

Status record_event(Event* event, Stream* stream);
Status wait_event(Stream* stream, Event* event);

}  // namespace driver
