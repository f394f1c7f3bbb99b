#include "clocks.h"

#include <algorithm>

#include "streams.h"

namespace driver {

Point::Point(Stream* of, uint64_t given_number)
    : stream(of ? of->shared_from_this() : nullptr), number(given_number) {}

void join(Clock& clock, const Clock& other) {
  for (const auto& [id, number] : other) {
    uint64_t& mine = clock[id];
    mine = std::max(mine, number);
  }
}

void join(Clock& clock, const Point& point) {
  if (!point.stream || !point.stream->id) return;
  uint64_t& mine = clock[point.stream->id];
  mine = std::max(mine, point.number);
}

bool holds(const Clock& clock, uint64_t stream_id, uint64_t number) {
  const auto it = clock.find(stream_id);
  return it != clock.end() && it->second >= number;
}

}  // namespace driver
