// Blocks of memory: of the stub driver's devices, and page-locked ones.
#pragma once

#include "arena.h"

namespace driver {

struct Stream;

// What freed memory is filled with, and what new memory holds. As floats: -3.7e28; as rows:
// negative.
constexpr unsigned char poison = 0xEE;
// What lies behind each block.
constexpr unsigned char canary = 0xC5;
constexpr size_t alignment = 512;

enum class Kind { pageable, page_locked, device };

struct Place {
  Kind kind = Kind::pageable;
  int device = -1;
  Address block = 0;
  size_t offset = 0;
  size_t size = 0;      // of the block
  bool is_live = true;  // false in freed memory, or between blocks
};

Place find_place(const void* at);

// Says what is wrong with bytes that a call names; null if nothing is.
const char* why_not(const void* at, size_t num_bytes);

Status allocate(int device, size_t num_bytes, void** at);
Status release(void* at);
Status lock_pages(size_t num_bytes, void** at);
Status unlock_pages(void* at);
size_t used_bytes(int device);

// Counts the driver's own writes to a page-locked block, so that the program's can be told apart.
uint64_t& writes_to(const void* page_locked);

// Parts of blocks, as CuPy's pool hands them out.
void part_taken(int device, void* at, size_t num_bytes, size_t with_canary, void* stream);
void part_freed(void* at);
// A stream has the handle of one that is gone, and so the memory that CuPy keeps under it.
void parts_inherited(const Stream* gone, Stream* heir);
// Looks at every canary and all freed memory now; what is wrong is reported.
void check_memory();

}  // namespace driver
