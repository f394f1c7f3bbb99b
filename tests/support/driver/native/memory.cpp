#include "memory.h"

#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <deque>

#include "streams.h"

namespace driver {

namespace {

// So much freed memory is kept from being used again, to see who writes to it.
constexpr size_t most_in_quarantine = size_t(64) << 20;
// Filling more would take longer than it tells.
constexpr size_t most_filled = size_t(64) << 20;

struct Block {
  size_t size;  // that was asked for
  size_t room;  // with the canary
};

struct Device {
  size_t used = 0;
  std::map<Address, Block> live;
  std::map<Address, size_t> unused;  // before the end of what was ever used
  std::deque<std::pair<Address, size_t>> quarantine;
  size_t in_quarantine = 0;
};

struct Part {
  int device;
  size_t size;
  size_t room;
  std::shared_ptr<Stream> stream;
};

struct PageLocked {
  size_t size;
  uint64_t writes = 0;
};

Device devices[most_devices];
std::map<Address, PageLocked> page_locked;
std::map<Address, Part> parts;
// Freed parts of blocks: not to be named by calls, nor written.
std::map<Address, Part> freed_parts;

char* alias_of(Address at) { return alias(reinterpret_cast<void*>(at)); }

bool holds_only(Address at, size_t num_bytes, unsigned char value) {
  const char* bytes = alias_of(at);
  return num_bytes == 0 || (static_cast<unsigned char>(bytes[0]) == value &&
                            !memcmp(bytes, bytes + 1, num_bytes - 1));
}

size_t first_change(Address at, size_t num_bytes, unsigned char value) {
  const char* bytes = alias_of(at);
  size_t i = 0;
  while (i < num_bytes && static_cast<unsigned char>(bytes[i]) == value) ++i;
  return i;
}

void fill(Address at, size_t num_bytes, unsigned char value) {
  if (num_bytes <= most_filled) memset(alias_of(at), value, num_bytes);
}

void check_canary(int device, Address at, size_t size, size_t room) {
  if (holds_only(at + size, room - size, canary)) return;
  const size_t first = first_change(at + size, room - size, canary);
  report("gpu:%d: byte %zu behind the end of a block of %zu bytes was written, at %#lx", device,
         first, size, at + size + first);
  memset(alias_of(at + size), canary, room - size);
}

void check_freed(int device, Address at, size_t size) {
  if (size > most_filled || holds_only(at, size, poison)) return;
  const size_t first = first_change(at, size, poison);
  report("gpu:%d: freed memory was written: byte %zu of the %zu at %#lx", device, first, size, at);
  fill(at, size, poison);
}

// Takes the first room that is large enough; new room is at the end.
Address take_room(int number, size_t room) {
  Device& device = devices[number];
  for (auto it = device.unused.begin(); it != device.unused.end(); ++it) {
    if (it->second < room) continue;
    const auto [at, size] = *it;
    device.unused.erase(it);
    if (size > room) device.unused[at + room] = size - room;
    return at;
  }
  const Address at = end_of(number);
  if (at + room > begin_of(number) + bytes_of_device) return 0;
  end_of(number) += room;
  return at;
}

void give_room(Device& device, Address at, size_t room) {
  const size_t whole_pages = room / page_size * page_size;
  if (at % page_size == 0 && whole_pages) {
    madvise(alias_of(at), whole_pages, MADV_REMOVE);
  }
  auto after = device.unused.lower_bound(at);
  if (after != device.unused.end() && at + room == after->first) {
    room += after->second;
    after = device.unused.erase(after);
  }
  if (after != device.unused.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == at) {
      before->second += room;
      return;
    }
  }
  device.unused[at] = room;
}

template <class Blocks>
auto find_in(Blocks& blocks, Address at) {
  auto it = blocks.upper_bound(at);
  if (it == blocks.begin()) return blocks.end();
  --it;
  return at < it->first + std::max<size_t>(it->second.size, 1) ? it : blocks.end();
}

}  // namespace

Status allocate(int device_number, size_t num_bytes, void** at) {
  map_arena();
  Device& device = devices[device_number];
  const size_t room = (num_bytes + 2 * alignment - 1) / alignment * alignment;
  const Address begin = take_room(device_number, room);
  if (!begin) {
    return refuse(cudaErrorMemoryAllocation, "gpu:%d has %zu bytes, of which %zu are used",
                  device_number, bytes_of_device, device.used);
  }
  device.live[begin] = {num_bytes, room};
  device.used += room;
  fill(begin, num_bytes, poison);
  memset(alias_of(begin + num_bytes), canary, room - num_bytes);
  *at = reinterpret_cast<void*>(begin);
  return cudaSuccess;
}

Status release(void* at) {
  if (!at) return cudaSuccess;
  const Address begin = reinterpret_cast<Address>(at);
  for (int i = 0; i < settings().num_devices; ++i) {
    Device& device = devices[i];
    const auto it = device.live.find(begin);
    if (it == device.live.end()) continue;
    const Block block = it->second;
    check_canary(i, begin, block.size, block.room);
    fill(begin, block.room, poison);
    device.live.erase(it);
    device.used -= block.room;
    freed_parts.erase(freed_parts.lower_bound(begin), freed_parts.lower_bound(begin + block.room));
    device.quarantine.emplace_back(begin, block.room);
    device.in_quarantine += block.room;
    while (device.in_quarantine > most_in_quarantine) {
      const auto [oldest, room] = device.quarantine.front();
      device.quarantine.pop_front();
      device.in_quarantine -= room;
      check_freed(i, oldest, room);
      give_room(device, oldest, room);
    }
    return cudaSuccess;
  }
  return refuse(cudaErrorInvalidValue, "cudaFree of %p, where no block begins", at);
}

Status lock_pages(size_t num_bytes, void** at) {
  if (posix_memalign(at, page_size, std::max<size_t>(num_bytes, 1))) {
    return refuse(cudaErrorMemoryAllocation, "the host has no %zu bytes", num_bytes);
  }
  if (num_bytes <= most_filled) memset(*at, poison, num_bytes);
  page_locked[reinterpret_cast<Address>(*at)] = {num_bytes};
  return cudaSuccess;
}

Status unlock_pages(void* at) {
  if (!page_locked.erase(reinterpret_cast<Address>(at))) {
    return refuse(cudaErrorInvalidValue, "%p is no page-locked block", at);
  }
  free(at);
  return cudaSuccess;
}

size_t used_bytes(int device) { return devices[device].used; }

uint64_t& writes_to(const void* at) {
  static uint64_t nowhere;
  const auto it = find_in(page_locked, reinterpret_cast<Address>(at));
  return it == page_locked.end() ? nowhere : it->second.writes;
}

Place find_place(const void* pointer) {
  const Address at = reinterpret_cast<Address>(pointer);
  Place place;
  if (is_on_device(at)) {
    place.kind = Kind::device;
    place.device = device_of(at);
    auto& live = devices[place.device].live;
    auto it = find_in(live, at);
    // CuPy names the end of a block for arrays without elements.
    if (it == live.end()) it = find_in(live, at - 1);
    place.is_live = it != live.end();
    if (place.is_live) {
      place.block = it->first;
      place.offset = at - it->first;
      place.size = it->second.size;
    }
    return place;
  }
  const auto it = find_in(page_locked, at);
  if (it != page_locked.end()) {
    place.kind = Kind::page_locked;
    place.block = it->first;
    place.offset = at - it->first;
    place.size = it->second.size;
  }
  return place;
}

const char* why_not(const void* at, size_t num_bytes) {
  const Place place = find_place(at);
  if (!at && num_bytes) return "is a null pointer";
  if (place.kind == Kind::pageable || num_bytes == 0) return nullptr;
  if (!place.is_live) return "is in no block of device memory: it was freed, or never allocated";
  if (place.offset + num_bytes > place.size) return "reaches beyond the end of its block";
  const auto freed = find_in(freed_parts, reinterpret_cast<Address>(at));
  if (freed != freed_parts.end()) return "is in memory that was freed";
  return nullptr;
}

void part_taken(int device, void* pointer, size_t num_bytes, size_t with_canary, void* handle) {
  const Address at = reinterpret_cast<Address>(pointer);
  Stream* stream = find_stream(device, handle);
  std::vector<std::pair<Address, Part>> were_freed;
  auto it = freed_parts.lower_bound(at);
  if (it != freed_parts.begin() && std::prev(it)->first + std::prev(it)->second.room > at) --it;
  while (it != freed_parts.end() && it->first < at + with_canary) {
    were_freed.push_back(*it);
    it = freed_parts.erase(it);
  }
  parts[at] = {device, num_bytes, with_canary, stream ? stream->shared_from_this() : nullptr};
  if (!stream || is_capturing(stream)) return;
  enqueue_own(stream, "allocate", [=] {
    for (const auto& [begin, part] : were_freed) check_freed(part.device, begin, part.room);
    fill(at, num_bytes, poison);
    memset(alias_of(at + num_bytes), canary, with_canary - num_bytes);
  });
}

void part_freed(void* pointer) {
  const Address at = reinterpret_cast<Address>(pointer);
  const auto it = parts.find(at);
  if (it == parts.end()) return;
  const Part part = it->second;
  parts.erase(it);
  // A capture would take the filling for a part of the graph.
  if (!part.stream || is_capturing(part.stream.get())) return;
  freed_parts[at] = part;
  enqueue_own(part.stream.get(), "free", [=] {
    check_canary(part.device, at, part.size, part.room);
    fill(at, part.room, poison);
  });
}

void parts_inherited(const Stream* gone, Stream* heir) {
  for (auto& [at, part] : parts) {
    if (part.stream.get() == gone) part.stream = heir->shared_from_this();
  }
}

void check_memory() {
  for (const auto& [at, part] : parts) check_canary(part.device, at, part.size, part.room);
  for (const auto& [at, part] : freed_parts) check_freed(part.device, at, part.room);
  for (int i = 0; i < settings().num_devices; ++i) {
    for (const auto& [at, block] : devices[i].live) check_canary(i, at, block.size, block.room);
    for (const auto& [at, room] : devices[i].quarantine) check_freed(i, at, room);
  }
}

}  // namespace driver
