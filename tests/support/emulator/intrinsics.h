// CUDA's built-in functions, as kernels call them.
#pragma once

#include <bit>
#include <cmath>
#include <type_traits>

#include "block.h"

constexpr int warpSize = emulator::lanes_per_warp;

// ---- Barriers and fences

inline void __syncthreads(emulator::Where where = emulator::Where::current()) {
  emulator::wait_for_block(0, where);
}

inline int __syncthreads_or(int predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::wait_for_block(predicate, where) > 0;
}

inline int __syncthreads_and(int predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::wait_for_block(!predicate, where) == 0;
}

inline int __syncthreads_count(int predicate, emulator::Where where = emulator::Where::current()) {
  return emulator::wait_for_block(predicate, where);
}

inline void __syncwarp(unsigned mask = ~0u, emulator::Where where = emulator::Where::current()) {
  emulator::meet("__syncwarp", mask, 0, where, /*orders_memory=*/true);
}

// Atomics are relaxed, as on a GPU: only a fence orders other accesses. Every fence is taken to be
// ordered after all earlier ones, so a fence that is needed elsewhere can hide one that is missing.
inline void __threadfence() {
#if defined(__SANITIZE_THREAD__)
  static uint64_t token;
  emulator::release(&token);
  emulator::acquire(&token);
#endif
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

inline void __trap() { emulator::fail("__trap()"); }

// ---- Warps

namespace emulator {

template <class Value>
uint64_t to_bits(Value value) {
  static_assert(sizeof(Value) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

// Each lane brings a value and takes that of lane `source`, or keeps its own.
template <class Value>
Value exchange(const char* name, unsigned mask, Value value, int source, bool keeps_own,
               const Where& where) {
  const uint64_t* values = meet(name, mask, to_bits(value), where);
  if (keeps_own) return value;
  if (is_strict && !(mask >> source & 1)) {
    fail("%s at %s:%u reads lane %d, which the mask %08x lacks", name, file_of(where), where.line(),
         source, mask);
  }
  Value result;
  memcpy(&result, &values[source], sizeof result);
  return result;
}

inline int lane() { return current->number % lanes_per_warp; }
inline int first_lane(int width) { return lane() / width * width; }

inline unsigned ballot(const char* name, unsigned mask, bool predicate, const Where& where) {
  const uint64_t* values = meet(name, mask, predicate, where);
  unsigned result = 0;
  for (int i = 0; i < lanes_per_warp; ++i) {
    if ((mask >> i & 1) && values[i]) result |= 1u << i;
  }
  return result;
}

}  // namespace emulator

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = warpSize,
                  emulator::Where where = emulator::Where::current()) {
  const int lane = emulator::first_lane(width) + (source & (width - 1));
  return emulator::exchange("__shfl_sync", mask, value, lane, false, where);
}

template <class Value>
Value __shfl_up_sync(unsigned mask, Value value, unsigned distance, int width = warpSize,
                     emulator::Where where = emulator::Where::current()) {
  const int lane = emulator::lane() - static_cast<int>(distance);
  const bool keeps_own = lane < emulator::first_lane(width);
  return emulator::exchange("__shfl_up_sync", mask, value, lane, keeps_own, where);
}

template <class Value>
Value __shfl_down_sync(unsigned mask, Value value, unsigned distance, int width = warpSize,
                       emulator::Where where = emulator::Where::current()) {
  const int lane = emulator::lane() + static_cast<int>(distance);
  const bool keeps_own = lane >= emulator::first_lane(width) + width;
  return emulator::exchange("__shfl_down_sync", mask, value, lane, keeps_own, where);
}

template <class Value>
Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask, int width = warpSize,
                      emulator::Where where = emulator::Where::current()) {
  const int lane = emulator::lane() ^ lane_mask;
  const bool keeps_own = lane >= emulator::first_lane(width) + width;
  return emulator::exchange("__shfl_xor_sync", mask, value, lane, keeps_own, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emulator::Where where = emulator::Where::current()) {
  return emulator::ballot("__ballot_sync", mask, predicate, where);
}

inline int __any_sync(unsigned mask, int predicate,
                      emulator::Where where = emulator::Where::current()) {
  return emulator::ballot("__any_sync", mask, predicate, where) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      emulator::Where where = emulator::Where::current()) {
  return emulator::ballot("__all_sync", mask, !predicate, where) == 0;
}

template <class Value>
unsigned __match_any_sync(unsigned mask, Value value,
                          emulator::Where where = emulator::Where::current()) {
  const uint64_t mine = emulator::to_bits(value);
  const uint64_t* values = emulator::meet("__match_any_sync", mask, mine, where);
  unsigned result = 0;
  for (int i = 0; i < warpSize; ++i) {
    if ((mask >> i & 1) && values[i] == mine) result |= 1u << i;
  }
  return result;
}

// ---- Memory

#define EMULATOR_LOAD(name)     \
  template <class Value>        \
  Value name(const Value* at) { \
    return *at;                 \
  }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldcv)
EMULATOR_LOAD(__ldlu)
#undef EMULATOR_LOAD

// What compilers may take for granted: nothing, here.
inline bool __isGlobal(const void*) { return true; }
#define __builtin_assume(condition) static_cast<void>(condition)

#define EMULATOR_STORE(name)                                \
  template <class Value>                                    \
  void name(Value* at, std::type_identity_t<Value> value) { \
    *at = value;                                            \
  }
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stwt)
#undef EMULATOR_STORE

namespace emulator {

// Replaces *at by change(*at), and returns what was there.
template <class Value, class Change>
Value replace(Value* at, Change change) {
  using Bits = std::conditional_t<sizeof(Value) == 8, uint64_t, uint32_t>;
  static_assert(sizeof(Value) == sizeof(Bits), "atomics are of 32 or 64 bits");
  Bits* bits = reinterpret_cast<Bits*>(at);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    const Bits after = std::bit_cast<Bits>(change(std::bit_cast<Value>(before)));
    if (__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED)) {
      return std::bit_cast<Value>(before);
    }
  }
}

}  // namespace emulator

#define EMULATOR_ATOMIC(name, after)                                                             \
  template <class Value>                                                                         \
  Value name(Value* at, std::type_identity_t<Value> operand) {                                   \
    return emulator::replace(at, [operand](Value before) { return static_cast<Value>(after); }); \
  }
EMULATOR_ATOMIC(atomicAdd, before + operand)
EMULATOR_ATOMIC(atomicSub, before - operand)
EMULATOR_ATOMIC(atomicMin, operand < before ? operand : before)
EMULATOR_ATOMIC(atomicMax, before < operand ? operand : before)
EMULATOR_ATOMIC(atomicAnd, before& operand)
EMULATOR_ATOMIC(atomicOr, before | operand)
EMULATOR_ATOMIC(atomicXor, before ^ operand)
EMULATOR_ATOMIC(atomicExch, ((void)before, operand))
#undef EMULATOR_ATOMIC

template <class Value>
Value atomicCAS(Value* at, std::type_identity_t<Value> expected,
                std::type_identity_t<Value> desired) {
  return emulator::replace(
      at, [expected, desired](Value before) { return before == expected ? desired : before; });
}

// ---- Bits

// Bytes of `x`, 0 to 3, and `y`, by the lower three bits of each of four digits.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const int source = selector >> 4 * byte & 7;
    result |= static_cast<unsigned>(both >> 8 * source & 0xff) << 8 * byte;
  }
  return result;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

// ---- Arithmetic that CUDA has and the C++ library has not

using std::isfinite;
using std::isinf;
using std::isnan;

// Not <algorithm>'s: each kernel would take g++ a tenth longer.
template <class Value>
constexpr const Value& max(const Value& a, const Value& b) {
  return a < b ? b : a;
}
template <class Value>
constexpr const Value& min(const Value& a, const Value& b) {
  return b < a ? b : a;
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline double cospi(double x) { return cos(3.14159265358979323846 * x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
