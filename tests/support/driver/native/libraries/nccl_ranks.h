// What the ranks of one communicator share: memory that threads and processes see alike.
//
// The file behind it has no name any more when all have come, so nothing is left when they are
// killed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace nccl {

constexpr int most_ranks = 16;
// What one rank may give to the others at a time.
constexpr size_t most_bytes = size_t(256) << 20;

enum class Kind : int32_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
};

// What a rank has called; the same on all ranks.
struct Call {
  Kind kind;
  int32_t type;
  int32_t op;
  int32_t root;
  uint64_t count;
};

class Ranks {
 public:
  // Opens what ranks of this identity share; null if another number of ranks was said.
  static std::shared_ptr<Ranks> open(const std::string& identity, int size);
  ~Ranks();

  // Comes as a rank; false if it is there already.
  bool join(int rank, int device);
  bool all_have_joined() const;
  // Whether two ranks have one device of one process.
  bool share_a_device() const;
  // Comes with the first collective, for which NCCL connects the ranks.
  void connect();
  bool all_have_connected() const;
  // Whether the process of another rank has ended.
  bool has_lost_one(int rank) const;

  // The `number`-th collective of a rank, from 1: what it calls, and its bytes one after the other.
  char* begin(int rank, uint64_t number, const std::vector<Call>& calls);
  void arrive(int rank, uint64_t number);
  bool all_have_arrived(uint64_t number) const;
  std::vector<Call> calls(int rank, uint64_t number) const;
  const char* bytes(int rank, uint64_t number) const;

 private:
  struct Memory;
  Ranks(std::string path, Memory* memory) : path(std::move(path)), memory(memory) {}
  char* area(int rank, uint64_t number) const;

  std::string path;
  Memory* memory;
};

}  // namespace nccl
