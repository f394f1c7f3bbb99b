// Thrust's sorting, as CuPy calls it.
#include <cstdint>
#include <cstring>
#include <numeric>

#include "libraries/call.h"

using namespace driver;

namespace {

// NaN is the largest, as in numpy.
template <class Value>
bool is_less(Value a, Value b) {
  return a < b || (b != b && a == a);
}

template <class Value>
int sort(Handle* handle, void* data, int64_t* positions, int64_t rows, int64_t length) {
  return library_call(positions ? "thrust argsort" : "thrust sort", handle,
                      {{data, size_t(rows * length) * sizeof(Value)},
                       {positions, positions ? size_t(rows * length) * 8 : 0}},
                      [=] {
                        for (int64_t row = 0; row < rows; ++row) {
                          Value* values = memory<Value>(data) + row * length;
                          if (!positions) {
                            std::stable_sort(values, values + length, is_less<Value>);
                            continue;
                          }
                          int64_t* order = memory<int64_t>(positions) + row * length;
                          std::iota(order, order + length, 0);
                          std::stable_sort(order, order + length, [=](int64_t i, int64_t j) {
                            return is_less(values[i], values[j]);
                          });
                        }
                      });
}

}  // namespace

// Sorts rows in place, or writes where each sorted element was. `type` is numpy's kind and size.
extern "C" int driver_sort(int device, void* stream, const char* type, void* data,
                           int64_t* positions, int64_t rows, int64_t length) {
  Handle handle{device, stream};
#define CASE(name, Value) \
  if (!strcmp(type, name)) return sort<Value>(&handle, data, positions, rows, length)
  CASE("f8", double);
  CASE("f4", float);
  CASE("f2", _Float16);
  CASE("b1", uint8_t);
  CASE("i1", int8_t);
  CASE("i2", int16_t);
  CASE("i4", int32_t);
  CASE("i8", int64_t);
  CASE("u1", uint8_t);
  CASE("u2", uint16_t);
  CASE("u4", uint32_t);
  CASE("u8", uint64_t);
#undef CASE
  return missing("thrust sort of this type");
}
