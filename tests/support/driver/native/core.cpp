#include "core.h"

#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include <unordered_map>

namespace driver {

namespace {

// By the literal itself: several may say the same.
std::unordered_map<const char*, long> counts;
std::vector<std::string> reports;
std::pair<Status, std::string> broken_devices[most_devices];
thread_local int device;
thread_local bool is_bound;
thread_local Status refused;
thread_local std::string reason;

std::string format_all(const char* format, va_list arguments) {
  char text[2048];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

}  // namespace

void Lock::lock() {
  mutex.lock();
  ++depth;
}

void Lock::unlock() {
  --depth;
  mutex.unlock();
}

void Lock::pause() {
  const int before = depth;
  for (int i = 0; i < before; ++i) unlock();
  usleep(100);
  for (int i = 0; i < before; ++i) lock();
}

Lock& lock() {
  static Lock one;
  return one;
}

int current_device() { return device; }
void set_current_device(int index) {
  device = index;
  make_context_current();
}

bool has_context() { return is_bound; }
void make_context_current() { is_bound = true; }

Settings& settings() {
  static Settings all;
  return all;
}

Status refuse(Status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  reason = format_all(format, arguments);
  va_end(arguments);
  return refused = status;
}

const std::string& last_reason(Status status) {
  static const std::string none;
  return status == refused ? reason : none;
}

void report(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  reports.push_back(format_all(format, arguments));
  va_end(arguments);
}

void break_device(int index, Status status, const std::string& why) {
  if (broken_devices[index].first == cudaSuccess) broken_devices[index] = {status, why};
}

Status broken(int index) {
  const auto& [status, why] = broken_devices[index];
  return status ? refuse(status, "%s", why.c_str()) : cudaSuccess;
}

void count(const char* what, long by) { counts[what] += by; }

}  // namespace driver

using namespace driver;

// Returns what is to be told to Python: lines of text, until the next call.
extern "C" const char* driver_counts() {
  static std::string text;
  std::lock_guard held(lock());
  text.clear();
  std::map<std::string, long> by_name;
  for (const auto& [name, number] : counts) by_name[name] += number;
  for (const auto& [name, number] : by_name) text += name + " " + std::to_string(number) + "\n";
  return text.c_str();
}

extern "C" const char* driver_take_reports() {
  static std::string text;
  std::lock_guard held(lock());
  text.clear();
  for (const auto& line : reports) text += line + "\n";
  reports.clear();
  return text.c_str();
}

extern "C" void driver_repair_devices() {
  std::lock_guard held(lock());
  for (auto& broken : broken_devices) broken = {};
}

extern "C" void driver_configure(int num_devices, int cuda_version) {
  settings() = {num_devices, cuda_version};
}
