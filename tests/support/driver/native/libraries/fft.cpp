// cuFFT: transforms of one dimension, of arrays side by side, by their definition.
#include <cmath>
#include <complex>
#include <map>

#include "libraries/call.h"

using namespace driver;

namespace {

struct Plan {
  Handle* handle;
  int length = 0;
  int batch = 0;
};

// A plan's number is what the program has.
std::map<int, Plan> plans;

constexpr int invalid_plan = 1;
constexpr int unsupported = 16;

// The transforms of `batch` arrays; of real input, or to real output, half of the complex numbers
// are there.
template <class Real, bool from_real, bool to_real>
int transform(const char* name, int number, const void* input, void* output, int sign) {
  const auto it = plans.find(number);
  if (it == plans.end()) return invalid_plan;
  const Plan plan = it->second;
  const int n = plan.length, half = n / 2 + 1;
  const size_t in_values = from_real ? n : to_real ? 2 * half : 2 * n;
  const size_t out_values = to_real ? n : from_real ? 2 * half : 2 * n;
  return library_call(
      name, plan.handle,
      {{input, plan.batch * in_values * sizeof(Real)},
       {output, plan.batch * out_values * sizeof(Real)}},
      [=] {
        for (int b = 0; b < plan.batch; ++b) {
          const Real* from = memory<Real>(input) + b * in_values;
          Real* to = memory<Real>(output) + b * out_values;
          std::vector<std::complex<double>> x(n);
          for (int i = 0; i < n; ++i) {
            if (from_real) {
              x[i] = from[i];
            } else if (!to_real || i < half) {
              x[i] = {from[2 * i], from[2 * i + 1]};
            } else {
              x[i] = {from[2 * (n - i)], -double(from[2 * (n - i) + 1])};
            }
          }
          for (int k = 0; k < (from_real ? half : n); ++k) {
            std::complex<double> sum = 0;
            for (int i = 0; i < n; ++i) {
              sum += x[i] * std::polar(1.0, sign * 2 * M_PI * double(size_t(i) * k % n) / n);
            }
            if (to_real) {
              to[k] = Real(sum.real());
            } else {
              to[2 * k] = Real(sum.real());
              to[2 * k + 1] = Real(sum.imag());
            }
          }
        }
      });
}

}  // namespace

extern "C" {

int cufftGetVersion(int* version) {
  *version = 12000;
  return 0;
}

int cufftCreate(int* number) {
  static int last = 0;
  plans[*number = ++last] = {new_handle()};
  return 0;
}

int cufftDestroy(int number) {
  plans.erase(number);
  return 0;
}

int cufftSetAutoAllocation(int, int) { return 0; }
int cufftSetWorkArea(int, void*) { return 0; }

int cufftSetStream(int number, void* stream) {
  plans.at(number).handle->stream = stream;
  return 0;
}

int cufftMakePlan1d(int number, int length, int, int batch, size_t* work_size) {
  plans.at(number).length = length;
  plans.at(number).batch = batch;
  *work_size = 0;
  return 0;
}

int cufftMakePlanMany(int, int, int*, int*, int, int, int*, int, int, int, int, size_t*) {
  missing(__func__);
  return unsupported;
}

int cufftExecC2C(int plan, void* in, void* out, int sign) {
  return transform<float, false, false>(__func__, plan, in, out, sign);
}
int cufftExecR2C(int plan, void* in, void* out) {
  return transform<float, true, false>(__func__, plan, in, out, -1);
}
int cufftExecC2R(int plan, void* in, void* out) {
  return transform<float, false, true>(__func__, plan, in, out, 1);
}
int cufftExecZ2Z(int plan, void* in, void* out, int sign) {
  return transform<double, false, false>(__func__, plan, in, out, sign);
}
int cufftExecD2Z(int plan, void* in, void* out) {
  return transform<double, true, false>(__func__, plan, in, out, -1);
}
int cufftExecZ2D(int plan, void* in, void* out) {
  return transform<double, false, true>(__func__, plan, in, out, 1);
}

}  // extern "C"
