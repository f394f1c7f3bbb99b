// Evaluates a schedule at consecutive steps.
#include "shared/grid.cuh"
#include "shared/schedules.cuh"

namespace gpuopt {

// Writes the values at `count` steps from `*step` on; the step is in device memory, too.
template <class Real>
__global__ void evaluate_schedule(const double* __restrict__ form,
                                  const long long* __restrict__ step, long long count,
                                  Real* __restrict__ values) {
  for (long long i = first_item(); i < count; i += items_per_pass()) {
    values[i] = schedule_at<Real>(form, *step + i);
  }
}

}  // namespace gpuopt
