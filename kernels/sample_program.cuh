// What gpuopt generates from the rule `adam` in gpuopt/optimizers/adam.py, for compilers to read
// before dense_update.cu, and the program that they read after it, for float32 variables. Then
// gpuopt::dense_update<gpuopt::adam_78f26089_float_Alone_bd31d25f>
// is a kernel. Nothing includes this file; `.venv/bin/python tests/support/tables.py` writes it.
// clang-format off
#include "shared/numpy.cuh"
#include "shared/rule.cuh"
#ifndef GPUOPT_TRACED_adam_78f26089
#define GPUOPT_TRACED_adam_78f26089
namespace gpuopt {
namespace traced {
struct adam_78f26089 : RuleDefaults {
  static constexpr int num_slots = 2;
  template <class Real>
  struct Scalars { Real step_size_, beta1_, beta2_, epsilon_; };
  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real* slot, const Scalars<Real>& s) {
#line 46 "gpuopt/optimizers/adam.py"
    const Real t0 = slot[0] + ((Real(1.0) - s.beta1_) * (grad - slot[0]));
#line 47 "gpuopt/optimizers/adam.py"
    const Real t1 = slot[1] + ((Real(1.0) - s.beta2_) * ((grad * grad) - slot[1]));
#line 48 "gpuopt/optimizers/adam.py"
    const Real new_0 = (var - ((s.step_size_ * t0) / ((numpy::sqrt(t1)) + s.epsilon_)));
#line 46 "gpuopt/optimizers/adam.py"
    const Real new_1 = t0;
#line 47 "gpuopt/optimizers/adam.py"
    const Real new_2 = t1;
#line 48 "gpuopt/optimizers/adam.py"
    var = new_0;
#line 46 "gpuopt/optimizers/adam.py"
    slot[0] = new_1;
#line 47 "gpuopt/optimizers/adam.py"
    slot[1] = new_2;
#line 1 "generated"
  }
};
}
}
#endif
namespace gpuopt {
struct adam_78f26089_float_Alone_bd31d25f : gpuopt::traced::adam_78f26089 {
  using Var = float;
  using Slot = float;
  using Gradient = float;
  using Companion = gpuopt::Alone;
  using GivenScalars = gpuopt::traced::adam_78f26089::Scalars<float>;
};
}
