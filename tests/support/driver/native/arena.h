// The memory of the stub driver's devices, as a whole.
//
// It is mapped twice: where the program sees it, nobody can read it except while a kernel runs; the
// driver reads and writes it elsewhere, at `alias(address)`.
#pragma once

#include "core.h"

namespace driver {

// Addresses of a device: several times its memory, so that gaps between blocks do no harm.
constexpr size_t bytes_of_device = size_t(64) << 30;
constexpr size_t page_size = 4096;

// Maps all of it, the first time.
void map_arena();
bool is_on_device(Address at);
int device_of(Address at);
Address begin_of(int device);
// The end of what a device has ever used.
Address& end_of(int device);

// Where the driver may read and write what the program calls `at`; the same for host memory.
char* alias(const void* at);
bool is_on_device(Address at);

void enable_peer(int from, int to);
bool is_peer_enabled(int from, int to);

// Kernels of `device` may run now: its memory, and its peers', is where the program sees it.
void unlock_memory(int device);
// Nor may anybody else; called when the host goes on.
void lock_memory();

// Runs a kernel; returns false, with the address, if it touched memory that it may not.
bool run_guarded(const std::function<void()>& kernel, Address* at);

}  // namespace driver
