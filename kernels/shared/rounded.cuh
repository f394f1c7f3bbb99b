// A rule, what it writes is rounded stochastically to bfloat16: by the loop around it, as it takes
// the number of the element. Mirrors `rounded` in gpuopt/rules/rounded.py.
#pragma once

// The layout of the scalars is checked by offsetof, and every compiler of ours has it right.
#if !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif

namespace gpuopt {

template <class Rule>
struct Rounded : Rule {
  static constexpr bool is_rounded = true;

  template <class Real>
  struct Scalars : Rule::template Scalars<Real> {
    // The key of the step's random bits, 16 of them in each, the lowest ones first.
    Real rounding_key_0, rounding_key_1, rounding_key_2, rounding_key_3;
  };
};

}  // namespace gpuopt
