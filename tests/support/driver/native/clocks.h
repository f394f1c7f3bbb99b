// Vector clocks: what a program may rely on to be done.
#pragma once

#include <map>
#include <memory>

#include "core.h"

namespace driver {

struct Stream;

// The `number`-th operation of a stream; none if there is no stream.
struct Point {
  Point() = default;
  Point(Stream* of, uint64_t given_number);

  std::shared_ptr<Stream> stream;
  uint64_t number = 0;
};

// Of each stream, by its id, the last operation that is certain to be done before. Streams that are
// forgotten are in none: all that they did is done.
using Clock = std::map<uint64_t, uint64_t>;

void join(Clock& clock, const Clock& other);
void join(Clock& clock, const Point& point);
bool holds(const Clock& clock, uint64_t stream_id, uint64_t number);

}  // namespace driver
