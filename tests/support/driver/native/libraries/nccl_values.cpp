#include "libraries/nccl_values.h"

#include <string.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace nccl {

// By the numbers of ncclDataType_t.
const size_t item_size[num_types] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

namespace {

struct BFloat16 {
  uint16_t bits;
};

float widen(_Float16 value) { return value; }
float widen(BFloat16 value) { return std::bit_cast<float>(uint32_t(value.bits) << 16); }
template <class Value>
Value widen(Value value) {
  return value;
}

template <class Value>
Value narrow(auto value) {
  if constexpr (std::is_same_v<Value, BFloat16>) {
    if (std::isnan(value)) return {0x7FC0};
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
  } else {
    return Value(value);
  }
}

template <class Wide>
Wide combine(int op, Wide a, Wide b) {
  // Integers wrap.
  using Sum = std::conditional_t<std::is_integral_v<Wide>, uint64_t, Wide>;
  switch (op) {
    case 0:
      return Wide(Sum(a) + Sum(b));
    case 1:
      return Wide(Sum(a) * Sum(b));
    case 2:
      if constexpr (std::is_integral_v<Wide>) return std::max(a, b);
      return std::fmax(a, b);
    default:
      if constexpr (std::is_integral_v<Wide>) return std::min(a, b);
      return std::fmin(a, b);
  }
}

template <class Value>
Value element(const char* bytes, size_t i) {
  Value value;
  memcpy(static_cast<void*>(&value), bytes + i * sizeof value, sizeof value);
  return value;
}

template <class Value>
void reduce_all(int op, const std::vector<const char*>& of_ranks, size_t count, char* result) {
  const size_t size = of_ranks.size(), part = (count + size - 1) / size;
  for (size_t i = 0; i < count; ++i) {
    const size_t first = i / part + 1;
    Value value = element<Value>(of_ranks[first % size], i);
    for (size_t step = 1; step < size; ++step) {
      const Value next = element<Value>(of_ranks[(first + step) % size], i);
      value = narrow<Value>(combine(op, widen(value), widen(next)));
    }
    memcpy(result + i * sizeof value, static_cast<const void*>(&value), sizeof value);
  }
}

}  // namespace

void reduce(int type, int op, const std::vector<const char*>& of_ranks, size_t count,
            char* result) {
  using Reduce = void (*)(int, const std::vector<const char*>&, size_t, char*);
  static const Reduce by_type[num_types] = {
      reduce_all<int8_t>,  reduce_all<uint8_t>,  reduce_all<int32_t>,  reduce_all<uint32_t>,
      reduce_all<int64_t>, reduce_all<uint64_t>, reduce_all<_Float16>, reduce_all<float>,
      reduce_all<double>,  reduce_all<BFloat16>,
  };
  by_type[type](op, of_ranks, count, result);
}

}  // namespace nccl
