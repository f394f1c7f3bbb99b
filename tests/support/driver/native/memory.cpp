#include "memory.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <deque>
#include <set>

#include "streams.h"

namespace driver {

namespace {

constexpr Address first_address = 0x200000000000;
constexpr size_t bytes_of_device = size_t(16) << 30;
constexpr size_t page_size = 4096;
// So much freed memory is kept from being used again, to see who writes to it.
constexpr size_t most_in_quarantine = size_t(64) << 20;
// Filling more would take longer than it tells.
constexpr size_t most_filled = size_t(64) << 20;

struct Block {
  size_t size;  // that was asked for
  size_t room;  // with the canary
};

struct Device {
  Address begin = 0;
  Address end = 0;  // of what has ever been used
  size_t used = 0;
  std::map<Address, Block> live;
  std::map<Address, size_t> unused;  // between begin and end
  std::deque<std::pair<Address, size_t>> quarantine;
  size_t in_quarantine = 0;
};

struct Part {
  int device;
  size_t size;
  size_t room;
  Stream* stream;
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
char* alias_begin;
bool peers[most_devices][most_devices];

thread_local sigjmp_buf out_of_kernel;
thread_local bool in_kernel;
thread_local Address faulted;
struct sigaction handler_before;

bool is_in_arena(Address at) {
  return at >= first_address && at < first_address + bytes_of_device * settings().num_devices;
}

void on_fault(int, siginfo_t* info, void*) {
  const Address at = reinterpret_cast<Address>(info->si_addr);
  if (in_kernel) {
    faulted = at;
    siglongjmp(out_of_kernel, 1);
  }
  if (is_in_arena(at)) {
    char text[160];
    const int length = snprintf(text, sizeof text,
                                "\nHost code touched the memory of gpu:%d at %#lx: only copies and "
                                "kernels can read it.\n",
                                int((at - first_address) / bytes_of_device), at);
    if (write(2, text, length) < 0) return;
  }
  sigaction(SIGSEGV, &handler_before, nullptr);
}

// Maps new memory to where the program sees it, and returns where the driver does.
char* map_memory() {
  const size_t size = bytes_of_device * settings().num_devices;
  const int file = memfd_create("memory of devices", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, size)) abort();
  void* wanted = reinterpret_cast<void*>(first_address);
  const int flags = MAP_SHARED | MAP_NORESERVE;
  const int where = alias_begin ? MAP_FIXED : MAP_FIXED_NOREPLACE;
  void* there = mmap(wanted, size, PROT_NONE, flags | where, file, 0);
  void* here = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file, 0);
  close(file);
  if (there != wanted || here == MAP_FAILED) {
    fprintf(stderr, "the driver cannot map the memory of its devices\n");
    abort();
  }
  return static_cast<char*>(here);
}

// A real GPU is of no use to a forked child. Here it has a copy of everything, so that a test can
// run a program from one state time and again, as long as its parent waits.
void copy_to_child() {
  char* const of_parent = alias_begin;
  alias_begin = map_memory();
  for (int i = 0; i < settings().num_devices; ++i) {
    const size_t offset = devices[i].begin - first_address;
    memcpy(alias_begin + offset, of_parent + offset, devices[i].end - devices[i].begin);
  }
  munmap(of_parent, bytes_of_device * settings().num_devices);
}

void map_arena() {
  if (alias_begin) return;
  alias_begin = map_memory();
  for (int i = 0; i < settings().num_devices; ++i) {
    devices[i].begin = devices[i].end = first_address + i * bytes_of_device;
  }
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &handler_before);
  pthread_atfork(nullptr, nullptr, copy_to_child);
}

char* alias_of(Address at) { return alias_begin + (at - first_address); }

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
Address take_room(Device& device, size_t room) {
  for (auto it = device.unused.begin(); it != device.unused.end(); ++it) {
    if (it->second < room) continue;
    const auto [at, size] = *it;
    device.unused.erase(it);
    if (size > room) device.unused[at + room] = size - room;
    return at;
  }
  const Address at = device.end;
  if (at + room > device.begin + bytes_of_device) return 0;
  device.end += room;
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

char* alias(const void* at) {
  const Address address = reinterpret_cast<Address>(at);
  return is_in_arena(address) ? alias_of(address) : const_cast<char*>(static_cast<const char*>(at));
}

bool is_on_device(Address at) { return is_in_arena(at); }

Status allocate(int device_number, size_t num_bytes, void** at) {
  map_arena();
  Device& device = devices[device_number];
  const size_t room = (num_bytes + 2 * alignment - 1) / alignment * alignment;
  const Address begin = take_room(device, room);
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
  if (is_in_arena(at)) {
    place.kind = Kind::device;
    place.device = int((at - first_address) / bytes_of_device);
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

void enable_peer(int from, int to) { peers[from][to] = true; }
bool is_peer_enabled(int from, int to) { return from == to || peers[from][to]; }

// Changing the protection takes time for each page in use, so many kernels run between changes.
static void protect(int index, bool is_open) {
  static Address open_until[most_devices];  // 0 where closed
  const Device& device = devices[index];
  const Address until = is_open ? device.end : 0;
  if (open_until[index] == until || device.end == device.begin) return;
  const size_t size = (device.end - device.begin + page_size - 1) / page_size * page_size;
  mprotect(reinterpret_cast<void*>(device.begin), size,
           is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
  open_until[index] = until;
}

void unlock_memory(int device) {
  for (int i = 0; i < settings().num_devices; ++i) protect(i, is_peer_enabled(device, i));
}

void lock_memory() {
  for (int i = 0; i < settings().num_devices; ++i) protect(i, false);
}

bool run_guarded(const std::function<void()>& kernel, Address* at) {
  struct sigaction action = {}, before;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
  const unsigned rounding = _mm_getcsr();
  bool succeeded = false;
  in_kernel = true;
  if (!sigsetjmp(out_of_kernel, 0)) {
    kernel();
    succeeded = true;
  } else {
    _mm_setcsr(rounding);
    *at = faulted;
  }
  in_kernel = false;
  sigaction(SIGSEGV, &before, nullptr);
  return succeeded;
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
  parts[at] = {device, num_bytes, with_canary, stream};
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
  freed_parts[at] = part;
  if (!part.stream || is_capturing(part.stream)) return;
  enqueue_own(part.stream, "free", [=] {
    check_canary(part.device, at, part.size, part.room);
    fill(at, part.room, poison);
  });
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
