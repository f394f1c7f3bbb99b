#include "libraries/nccl_ranks.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace nccl {

namespace {

struct Rank {
  std::atomic<int32_t> process;
  std::atomic<int32_t> device;
  std::atomic<uint64_t> arrived;
};

// Of what follows the memory's head: areas of each rank, used in turn. A rank that is at its next
// collective but one has been with all others at the next one, and they are done with this one.
constexpr size_t num_areas = 2;
constexpr size_t head_bytes = 4096;

bool is_alive(int process) {
  char path[64], state = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE* file = fopen(path, "r");
  if (!file) return false;
  const int found = fscanf(file, "%*d (%*[^)]) %c", &state);
  fclose(file);
  return found == 1 && state != 'Z';
}

}  // namespace

// All of it is 0 in the beginning.
struct Ranks::Memory {
  std::atomic<int32_t> size;
  std::atomic<int32_t> joined;
  std::atomic<int32_t> connected;
  Rank ranks[most_ranks];
};

static size_t total_bytes(int size) { return head_bytes + size * num_areas * most_bytes; }

std::shared_ptr<Ranks> Ranks::open(const std::string& identity, int size) {
  static_assert(sizeof(Memory) <= head_bytes);
  const std::string path = "/dev/shm/gpuopt-nccl-" + identity;
  const int file = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  // Pages that nobody has written take no memory.
  const bool is_there = ftruncate(file, off_t(total_bytes(size))) == 0;
  void* at = is_there ? mmap(nullptr, total_bytes(size), PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_NORESERVE, file, 0)
                      : MAP_FAILED;
  close(file);
  if (at == MAP_FAILED) return nullptr;
  std::shared_ptr<Ranks> ranks(new Ranks(path, static_cast<Memory*>(at)));
  int32_t said = 0;
  const bool is_first = ranks->memory->size.compare_exchange_strong(said, size);
  return is_first || said == size ? ranks : nullptr;
}

Ranks::~Ranks() {
  unlink(path.c_str());
  munmap(memory, total_bytes(memory->size));
}

bool Ranks::join(int rank, int device) {
  int32_t nobody = 0;
  if (!memory->ranks[rank].process.compare_exchange_strong(nobody, getpid())) return false;
  memory->ranks[rank].device = device;
  if (++memory->joined == memory->size) unlink(path.c_str());
  return true;
}

bool Ranks::all_have_joined() const { return memory->joined >= memory->size; }

void Ranks::connect() { ++memory->connected; }
bool Ranks::all_have_connected() const { return memory->connected >= memory->size; }

bool Ranks::share_a_device() const {
  for (int a = 0; a < memory->size; ++a) {
    for (int b = 0; b < a; ++b) {
      if (memory->ranks[a].process == memory->ranks[b].process &&
          memory->ranks[a].device == memory->ranks[b].device) {
        return true;
      }
    }
  }
  return false;
}

bool Ranks::has_lost_one(int rank) const {
  const int mine = memory->ranks[rank].process;
  return std::any_of(memory->ranks, memory->ranks + memory->size, [=](const Rank& other) {
    return other.process && other.process != mine && !is_alive(other.process);
  });
}

char* Ranks::area(int rank, uint64_t number) const {
  return reinterpret_cast<char*>(memory) + head_bytes +
         (rank * num_areas + number % num_areas) * most_bytes;
}

char* Ranks::begin(int rank, uint64_t number, const std::vector<Call>& calls) {
  char* const at = area(rank, number);
  const uint64_t num_calls = calls.size();
  memcpy(at, &num_calls, sizeof num_calls);
  memcpy(at + sizeof num_calls, calls.data(), num_calls * sizeof(Call));
  return const_cast<char*>(bytes(rank, number));
}

void Ranks::arrive(int rank, uint64_t number) { memory->ranks[rank].arrived = number; }

bool Ranks::all_have_arrived(uint64_t number) const {
  return std::all_of(memory->ranks, memory->ranks + memory->size,
                     [=](const Rank& rank) { return rank.arrived >= number; });
}

std::vector<Call> Ranks::calls(int rank, uint64_t number) const {
  const char* const at = area(rank, number);
  uint64_t num_calls;
  memcpy(&num_calls, at, sizeof num_calls);
  std::vector<Call> calls(num_calls);
  memcpy(static_cast<void*>(calls.data()), at + sizeof num_calls, num_calls * sizeof(Call));
  return calls;
}

const char* Ranks::bytes(int rank, uint64_t number) const {
  const char* const at = area(rank, number);
  uint64_t num_calls;
  memcpy(&num_calls, at, sizeof num_calls);
  const size_t head = sizeof num_calls + num_calls * sizeof(Call);
  return at + (head + 63) / 64 * 64;
}

}  // namespace nccl
