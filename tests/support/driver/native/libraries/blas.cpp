// cuBLAS: as much as CuPy needs for matrix products. Matrices are in Fortran's order.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "libraries/call.h"

using namespace driver;

namespace {

// cudaDataType_t
enum Type { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 14 };

size_t size_of(int type) { return type == float64 ? 8 : type == float32 ? 4 : 2; }

double load(int type, const char* at, size_t i) {
  if (type == float32) return reinterpret_cast<const float*>(at)[i];
  if (type == float64) return reinterpret_cast<const double*>(at)[i];
  if (type == float16) return float(reinterpret_cast<const _Float16*>(at)[i]);
  const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t*>(at)[i]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

void store(int type, char* at, size_t i, double value) {
  if (type == float32) {
    reinterpret_cast<float*>(at)[i] = float(value);
  } else if (type == float64) {
    reinterpret_cast<double*>(at)[i] = value;
  } else if (type == float16) {
    reinterpret_cast<_Float16*>(at)[i] = _Float16(value);
  } else {
    const float single = float(value);
    uint32_t bits;
    memcpy(&bits, &single, 4);
    // To the nearest, and to even between two.
    if (value == value) bits += 0x7FFF + (bits >> 16 & 1);
    reinterpret_cast<uint16_t*>(at)[i] = uint16_t(bits >> 16);
  }
}

// A scalar of a call: read now, or on the device when the work is done.
struct Scalar {
  const void* at;
  int type;
  bool is_on_device;
  double value = 0;

  Scalar(const void* given, int given_type, const Handle* handle)
      : at(given), type(given_type), is_on_device(handle->pointer_mode == 1) {
    if (!is_on_device) value = load(type, static_cast<const char*>(at), 0);
  }
  double get() const { return is_on_device ? load(type, alias(at), 0) : value; }
};

struct Matrix {
  const void* at;
  int type;
  int stride;              // between columns
  long long distance = 0;  // between the matrices of a batch
  bool is_transposed = false;
};

Operand operand(const Matrix& matrix, int rows, int columns, int count) {
  if (matrix.is_transposed) std::swap(rows, columns);
  if (!rows || !columns || !count) return {matrix.at, 0};
  const size_t elements =
      size_t(columns - 1) * matrix.stride + rows + size_t(count - 1) * matrix.distance;
  return {matrix.at, elements * size_of(matrix.type)};
}

// In the order in which the product reads it: row by row of the transposed or plain matrix.
std::vector<double> rows_of(const Matrix& matrix, const char* at, int rows, int columns) {
  std::vector<double> values(size_t(rows) * columns);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      const size_t from =
          matrix.is_transposed ? size_t(i) * matrix.stride + j : size_t(j) * matrix.stride + i;
      values[size_t(i) * columns + j] = load(matrix.type, at, from);
    }
  }
  return values;
}

void multiply(const Matrix& a, const char* a_at, const Matrix& b, const char* b_at, const Matrix& c,
              char* c_at, int m, int n, int k, double alpha, double beta) {
  const std::vector<double> left = rows_of(a, a_at, m, k), right = rows_of(b, b_at, k, n);
  std::vector<double> row(n);
  for (int i = 0; i < m; ++i) {
    std::fill(row.begin(), row.end(), 0.0);
    for (int p = 0; p < k; ++p) {
      const double factor = left[size_t(i) * k + p];
      const double* values = &right[size_t(p) * n];
      for (int j = 0; j < n; ++j) row[j] += factor * values[j];
    }
    for (int j = 0; j < n; ++j) {
      const size_t to = size_t(j) * c.stride + i;
      // With beta 0, C is only written.
      store(c.type, c_at, to, alpha * row[j] + (beta ? beta * load(c.type, c_at, to) : 0));
    }
  }
}

int gemm(const char* name, Handle* handle, int m, int n, int k, const void* alpha, const Matrix& a,
         const Matrix& b, const void* beta, const Matrix& c, int count, int scalar_type) {
  const Scalar by(alpha, scalar_type, handle), keep(beta, scalar_type, handle);
  return library_call(
      name, handle, {operand(a, m, k, count), operand(b, k, n, count), operand(c, m, n, count)},
      [=] {
        for (int i = 0; i < count; ++i) {
          multiply(a, alias(a.at) + i * a.distance * size_of(a.type), b,
                   alias(b.at) + i * b.distance * size_of(b.type), c,
                   alias(c.at) + i * c.distance * size_of(c.type), m, n, k, by.get(), keep.get());
        }
      });
}

// Of a batch whose matrices' addresses are on the device: the matrices themselves are checked when
// the work is done.
template <class Value>
int gemm_of_pointers(const char* name, Handle* handle, int op_a, int op_b, int m, int n, int k,
                     const Value* alpha, const Value* const* a, int lda, const Value* const* b,
                     int ldb, const Value* beta, Value* const* c, int ldc, int count) {
  constexpr int type = std::is_same_v<Value, double> ? float64 : float32;
  const Scalar by(alpha, type, handle), keep(beta, type, handle);
  const size_t bytes = count * sizeof(void*);
  return library_call(name, handle, {{a, bytes}, {b, bytes}, {c, bytes}}, [=] {
    for (int i = 0; i < count; ++i) {
      const Matrix left = {memory<Value*>(a)[i], type, lda, 0, op_a != 0};
      const Matrix right = {memory<Value*>(b)[i], type, ldb, 0, op_b != 0};
      const Matrix product = {memory<Value*>(c)[i], type, ldc};
      multiply(left, alias(left.at), right, alias(right.at), product, alias(product.at), m, n, k,
               by.get(), keep.get());
    }
  });
}

// cublasComputeType_t: those in double precision are 70 and 71.
int scalar_type_of(int compute) {
  return compute == 70 || compute == 71   ? float64
         : compute == 64 || compute == 65 ? float16
                                          : float32;
}

template <class Value>
constexpr int type_of = std::is_same_v<Value, double> ? float64 : float32;

template <class Value>
int gemv(const char* name, Handle* handle, int op, int m, int n, const Value* alpha, const Value* a,
         int lda, const Value* x, int incx, const Value* beta, Value* y, int incy) {
  const Scalar by(alpha, type_of<Value>, handle), keep(beta, type_of<Value>, handle);
  const int rows = op ? n : m, columns = op ? m : n;
  return library_call(name, handle,
                      {operand({a, type_of<Value>, lda}, m, n, 1),
                       {x, columns ? ((columns - 1) * size_t(incx) + 1) * sizeof(Value) : 0},
                       {y, rows ? ((rows - 1) * size_t(incy) + 1) * sizeof(Value) : 0}},
                      [=] {
                        const Value *matrix = memory<Value>(a), *vector = memory<Value>(x);
                        Value* result = memory<Value>(y);
                        for (int i = 0; i < rows; ++i) {
                          double sum = 0;
                          for (int j = 0; j < columns; ++j) {
                            sum += double(matrix[op ? size_t(i) * lda + j : size_t(j) * lda + i]) *
                                   vector[size_t(j) * incx];
                          }
                          Value& to = result[size_t(i) * incy];
                          to = Value(by.get() * sum + (keep.get() ? keep.get() * to : 0));
                        }
                      });
}

template <class Value>
int dot(const char* name, Handle* handle, int n, const Value* x, int incx, const Value* y, int incy,
        Value* result) {
  const auto run = [=] {
    double sum = 0;
    for (int i = 0; i < n; ++i) {
      sum += double(memory<Value>(x)[size_t(i) * incx]) * memory<Value>(y)[size_t(i) * incy];
    }
    *memory<Value>(result) = Value(sum);
  };
  const auto bytes = [n](int step) { return n ? ((n - 1) * size_t(step) + 1) * sizeof(Value) : 0; };
  std::vector<Operand> operands = {{x, bytes(incx)}, {y, bytes(incy)}};
  if (handle->pointer_mode == 1) operands.push_back({result, sizeof(Value)});
  return library_call(name, handle, operands, run);
}

template <class Value>
int ger(const char* name, Handle* handle, int m, int n, const Value* alpha, const Value* x,
        int incx, const Value* y, int incy, Value* a, int lda) {
  const Scalar by(alpha, type_of<Value>, handle);
  return library_call(name, handle, {operand({a, type_of<Value>, lda}, m, n, 1)}, [=] {
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < m; ++i) {
        memory<Value>(a)[size_t(j) * lda + i] += Value(
            by.get() * memory<Value>(x)[size_t(i) * incx] * memory<Value>(y)[size_t(j) * incy]);
      }
    }
  });
}

}  // namespace

extern "C" {

int cublasCreate_v2(Handle** handle) {
  *handle = new_handle();
  return 0;
}

int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}

int cublasGetVersion_v2(Handle*, int* version) {
  *version = 130000;
  return 0;
}

int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}

int cublasGetStream_v2(Handle* handle, void** stream) {
  *stream = handle->stream;
  return 0;
}

int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}

int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}

int cublasSetMathMode(Handle*, int) { return 0; }

int cublasGetMathMode(Handle*, int* mode) {
  *mode = 0;
  return 0;
}

int cublasGemmEx(Handle* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
                 const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                 const void* beta, void* c, int c_type, int ldc, int compute, int) {
  return gemm(__func__, handle, m, n, k, alpha, {a, a_type, lda, 0, op_a != 0},
              {b, b_type, ldb, 0, op_b != 0}, beta, {c, c_type, ldc}, 1, scalar_type_of(compute));
}

int cublasSgemmEx(Handle* handle, int op_a, int op_b, int m, int n, int k, const float* alpha,
                  const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                  const float* beta, void* c, int c_type, int ldc) {
  return gemm(__func__, handle, m, n, k, alpha, {a, a_type, lda, 0, op_a != 0},
              {b, b_type, ldb, 0, op_b != 0}, beta, {c, c_type, ldc}, 1, float32);
}

int cublasGemmStridedBatchedEx(Handle* handle, int op_a, int op_b, int m, int n, int k,
                               const void* alpha, const void* a, int a_type, int lda,
                               long long a_distance, const void* b, int b_type, int ldb,
                               long long b_distance, const void* beta, void* c, int c_type, int ldc,
                               long long c_distance, int count, int compute, int) {
  return gemm(__func__, handle, m, n, k, alpha, {a, a_type, lda, a_distance, op_a != 0},
              {b, b_type, ldb, b_distance, op_b != 0}, beta, {c, c_type, ldc, c_distance}, count,
              scalar_type_of(compute));
}

#define FOR_REAL(letter, Value)                                                                    \
  int cublas##letter##gemm_v2(Handle* handle, int op_a, int op_b, int m, int n, int k,             \
                              const Value* alpha, const Value* a, int lda, const Value* b,         \
                              int ldb, const Value* beta, Value* c, int ldc) {                     \
    constexpr int type = type_of<Value>;                                                           \
    return gemm(__func__, handle, m, n, k, alpha, {a, type, lda, 0, op_a != 0},                    \
                {b, type, ldb, 0, op_b != 0}, beta, {c, type, ldc}, 1, type);                      \
  }                                                                                                \
  int cublas##letter##gemmStridedBatched(                                                          \
      Handle* handle, int op_a, int op_b, int m, int n, int k, const Value* alpha, const Value* a, \
      int lda, long long a_distance, const Value* b, int ldb, long long b_distance,                \
      const Value* beta, Value* c, int ldc, long long c_distance, int count) {                     \
    constexpr int type = type_of<Value>;                                                           \
    return gemm(__func__, handle, m, n, k, alpha, {a, type, lda, a_distance, op_a != 0},           \
                {b, type, ldb, b_distance, op_b != 0}, beta, {c, type, ldc, c_distance}, count,    \
                type);                                                                             \
  }                                                                                                \
  int cublas##letter##gemmBatched(Handle* handle, int op_a, int op_b, int m, int n, int k,         \
                                  const Value* alpha, const Value* const* a, int lda,              \
                                  const Value* const* b, int ldb, const Value* beta,               \
                                  Value* const* c, int ldc, int count) {                           \
    return gemm_of_pointers(__func__, handle, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, \
                            ldc, count);                                                           \
  }                                                                                                \
  int cublas##letter##gemv_v2(Handle* handle, int op, int m, int n, const Value* alpha,            \
                              const Value* a, int lda, const Value* x, int incx,                   \
                              const Value* beta, Value* y, int incy) {                             \
    return gemv(__func__, handle, op, m, n, alpha, a, lda, x, incx, beta, y, incy);                \
  }                                                                                                \
  int cublas##letter##dot_v2(Handle* handle, int n, const Value* x, int incx, const Value* y,      \
                             int incy, Value* result) {                                            \
    return dot(__func__, handle, n, x, incx, y, incy, result);                                     \
  }                                                                                                \
  int cublas##letter##ger_v2(Handle* handle, int m, int n, const Value* alpha, const Value* x,     \
                             int incx, const Value* y, int incy, Value* a, int lda) {              \
    return ger(__func__, handle, m, n, alpha, x, incx, y, incy, a, lda);                           \
  }
FOR_REAL(S, float)
FOR_REAL(D, double)
#undef FOR_REAL

}  // extern "C"
