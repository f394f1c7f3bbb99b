#include "arena.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

namespace driver {

namespace {

constexpr Address first_address = 0x200000000000;

char* alias_begin;
Address ends[most_devices];
bool peers[most_devices][most_devices];

thread_local sigjmp_buf out_of_kernel;
thread_local bool in_kernel;
thread_local Address faulted;
struct sigaction handler_before;

void on_fault(int, siginfo_t* info, void*) {
  const Address at = reinterpret_cast<Address>(info->si_addr);
  if (in_kernel) {
    faulted = at;
    siglongjmp(out_of_kernel, 1);
  }
  if (is_on_device(at)) {
    char text[160];
    const int length = snprintf(text, sizeof text,
                                "\nHost code touched the memory of gpu:%d at %#lx: only copies and "
                                "kernels can read it.\n",
                                device_of(at), at);
    if (write(2, text, length) < 0) return;
  }
  sigaction(SIGSEGV, &handler_before, nullptr);
}

// Maps new memory to where the program sees it, and returns where the driver does.
char* map_memory() {
  const size_t size = bytes_of_device * settings().num_devices;
  const int file = memfd_create("memory of devices", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, size)) abort();
  void* wanted = reinterpret_cast<void*>(begin_of(0));
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
    const size_t offset = begin_of(i) - begin_of(0);
    memcpy(alias_begin + offset, of_parent + offset, end_of(i) - begin_of(i));
  }
  munmap(of_parent, bytes_of_device * settings().num_devices);
}

}  // namespace

bool is_on_device(Address at) { return at >= begin_of(0) && at < begin_of(settings().num_devices); }

int device_of(Address at) { return int((at - begin_of(0)) / bytes_of_device); }
Address begin_of(int device) { return first_address + device * bytes_of_device; }
Address& end_of(int device) { return ends[device]; }

void map_arena() {
  if (alias_begin) return;
  alias_begin = map_memory();
  for (int i = 0; i < settings().num_devices; ++i) end_of(i) = begin_of(i);
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &handler_before);
  pthread_atfork(nullptr, nullptr, copy_to_child);
}

char* alias(const void* at) {
  const Address address = reinterpret_cast<Address>(at);
  return is_on_device(address) ? alias_begin + (address - begin_of(0))
                               : const_cast<char*>(static_cast<const char*>(at));
}

void enable_peer(int from, int to) { peers[from][to] = true; }
bool is_peer_enabled(int from, int to) { return from == to || peers[from][to]; }

// Changing the protection takes time for each page in use, so many kernels run between changes.
static void protect(int index, bool is_open) {
  static Address open_until[most_devices];  // 0 where closed
  const Address begin = begin_of(index), end = end_of(index), until = is_open ? end : 0;
  if (open_until[index] == until || end == begin) return;
  const size_t size = (end - begin + page_size - 1) / page_size * page_size;
  mprotect(reinterpret_cast<void*>(begin), size, is_open ? PROT_READ | PROT_WRITE : PROT_NONE);
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

}  // namespace driver
