// cuSOLVER: linear equations, by Gaussian elimination with partial pivoting.
#include <cmath>

#include "libraries/call.h"

using namespace driver;

namespace {

template <class Real>
int factorize(const char* name, Handle* handle, int m, int n, Real* matrix, int stride, int* pivots,
              int* info) {
  const int count = std::min(m, n);
  return library_call(name, handle,
                      {{matrix, size_t(n) * stride * sizeof(Real)},
                       {pivots, count * sizeof(int)},
                       {info, sizeof(int)}},
                      [=] {
                        Real* a = memory<Real>(matrix);
                        const auto at = [=](int i, int j) -> Real& {
                          return a[size_t(j) * stride + i];
                        };
                        *memory<int>(info) = 0;
                        for (int k = 0; k < count; ++k) {
                          int pivot = k;
                          for (int i = k + 1; i < m; ++i) {
                            if (std::abs(at(i, k)) > std::abs(at(pivot, k))) pivot = i;
                          }
                          memory<int>(pivots)[k] = pivot + 1;
                          if (at(pivot, k) == 0) {
                            if (!*memory<int>(info)) *memory<int>(info) = k + 1;
                            continue;
                          }
                          for (int j = 0; j < n; ++j) std::swap(at(k, j), at(pivot, j));
                          for (int i = k + 1; i < m; ++i) {
                            at(i, k) /= at(k, k);
                            for (int j = k + 1; j < n; ++j) at(i, j) -= at(i, k) * at(k, j);
                          }
                        }
                      });
}

template <class Real>
int solve(const char* name, Handle* handle, int op, int n, int count, const Real* matrix,
          int stride, const int* pivots, Real* right, int right_stride, int* info) {
  return library_call(name, handle,
                      {{matrix, size_t(n) * stride * sizeof(Real)},
                       {pivots, n * sizeof(int)},
                       {right, size_t(count) * right_stride * sizeof(Real)},
                       {info, sizeof(int)}},
                      [=] {
                        const Real* a = memory<Real>(matrix);
                        const int* swaps = memory<int>(pivots);
                        const auto at = [=](int i, int j) { return a[size_t(j) * stride + i]; };
                        for (int c = 0; c < count; ++c) {
                          Real* x = memory<Real>(right) + size_t(c) * right_stride;
                          if (op == 0) {  // P L U x = b
                            for (int i = 0; i < n; ++i) std::swap(x[i], x[swaps[i] - 1]);
                            for (int i = 0; i < n; ++i) {
                              for (int j = 0; j < i; ++j) x[i] -= at(i, j) * x[j];
                            }
                            for (int i = n - 1; i >= 0; --i) {
                              for (int j = i + 1; j < n; ++j) x[i] -= at(i, j) * x[j];
                              x[i] /= at(i, i);
                            }
                          } else {  // U' L' P' x = b
                            for (int i = 0; i < n; ++i) {
                              for (int j = 0; j < i; ++j) x[i] -= at(j, i) * x[j];
                              x[i] /= at(i, i);
                            }
                            for (int i = n - 1; i >= 0; --i) {
                              for (int j = i + 1; j < n; ++j) x[i] -= at(j, i) * x[j];
                            }
                            for (int i = n - 1; i >= 0; --i) std::swap(x[i], x[swaps[i] - 1]);
                          }
                        }
                        *memory<int>(info) = 0;
                      });
}

}  // namespace

extern "C" {

int cusolverDnCreate(Handle** handle) {
  *handle = new_handle();
  return 0;
}

int cusolverDnDestroy(Handle* handle) {
  delete handle;
  return 0;
}

int cusolverDnSetStream(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}

int cusolverDnGetStream(Handle* handle, void** stream) {
  *stream = handle->stream;
  return 0;
}

int cusolverGetProperty(int, int* value) {
  *value = 12;
  return 0;
}

#define FOR_REAL(letter, Real)                                                                    \
  int cusolverDn##letter##getrf_bufferSize(Handle*, int, int, Real*, int, int* size) {            \
    *size = 1;                                                                                    \
    return 0;                                                                                     \
  }                                                                                               \
  int cusolverDn##letter##getrf(Handle* handle, int m, int n, Real* a, int lda, Real*,            \
                                int* pivots, int* info) {                                         \
    return factorize(__func__, handle, m, n, a, lda, pivots, info);                               \
  }                                                                                               \
  int cusolverDn##letter##getrs(Handle* handle, int op, int n, int count, const Real* a, int lda, \
                                const int* pivots, Real* b, int ldb, int* info) {                 \
    return solve(__func__, handle, op, n, count, a, lda, pivots, b, ldb, info);                   \
  }
FOR_REAL(S, float)
FOR_REAL(D, double)
#undef FOR_REAL

}  // extern "C"
