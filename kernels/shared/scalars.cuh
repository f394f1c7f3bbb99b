// The scalars that a launch is given: those of one group of variables, or of several.
#pragma once
#include "program.cuh"
#include "structs.cuh"

namespace gpuopt {

// How a launch is given them: as the rule's own, or as FewScalars, ClippedScalars or ScaledScalars.
template <class Program>
using GivenOf = typename Program::GivenScalars;

// Whether the variables or tables may be of several groups.
template <class Program>
constexpr bool has_groups = !are_same<GivenOf<Program>, ScalarsOf<Program>>;

// Whether scalars may have the number of a norm in the place of a clipping factor, or 0 in that of
// the reciprocal of the loss scale: the device has measured the one and changed the other.
template <class Given>
constexpr bool has_factors = false;
template <class Scalars, int count>
constexpr bool has_factors<ClippedScalars<Scalars, count>> = true;
template <class Scalars, int count>
constexpr bool has_factors<ScaledScalars<Scalars, count>> = true;

// Whether there are scalars for several counts of steps.
template <class Given>
constexpr bool has_counts = false;
template <class Scalars, int count>
constexpr bool has_counts<ScaledScalars<Scalars, count>> = true;

// Returns where the scalars of the groups begin: of as many steps as the device has made.
template <class Few>
__device__ __forceinline__ long long first_group(const Few&) {
  return 0;
}
template <class Scalars, int count>
__device__ __forceinline__ long long first_group(const ScaledScalars<Scalars, count>& few) {
  const long long behind = few.host_count - __ldg(reinterpret_cast<const long long*>(few.num_made));
  return behind > 0 ? behind * few.num_groups : 0;
}

// Returns scalars with the factors themselves.
template <class Program>
__device__ __forceinline__ ScalarsOf<Program> with_factors(ScalarsOf<Program> scalars,
                                                           const GivenOf<Program>& few) {
  using Real = RealOf<Program>;
  const ClipResult* results = reinterpret_cast<const ClipResult*>(few.factors);
  if constexpr (Program::is_unscaled) {
    if (scalars.unscale == Real(0)) scalars.unscale = static_cast<Real>(__ldg(&results->unscale));
  }
  if constexpr (Program::is_clipped) {
    const int norm = static_cast<int>(scalars.clip_factor);
    scalars.clip_factor = Real(1);
    if (norm >= 0) {
      scalars.clip_factor = static_cast<Real>(sizeof(Real) == sizeof(double)
                                                  ? __ldg(&results[norm].factor_of_doubles)
                                                  : __ldg(&results[norm].factor_of_floats));
    }
  }
  return scalars;
}

// What a gradient is multiplied by.
template <class Program>
__device__ __forceinline__ RealOf<Program> factor_in(const ScalarsOf<Program>& scalars) {
  RealOf<Program> factor = 1;
  if constexpr (Program::is_unscaled) factor *= scalars.unscale;
  if constexpr (Program::is_clipped) factor *= scalars.clip_factor;
  return factor;
}

// The scalars of several groups: those at `many`, or if it is null, those passed by value.
template <class Program, class Given = GivenOf<Program>>
struct GroupScalars {
  const Given& few;
  const ScalarsOf<Program>* __restrict__ many;

  // Returns a group's as they are given, without factors.
  __device__ __forceinline__ ScalarsOf<Program> given(long long group) const {
    const long long place = group + first_group(few);
    return many == nullptr ? few.of[place] : many[place];
  }

  __device__ __forceinline__ ScalarsOf<Program> of(long long group) const {
    if constexpr (has_factors<Given>) {
      return with_factors<Program>(given(group), few);
    } else {
      return given(group);
    }
  }

  // Returns one number, by its place among a group's, as it is given.
  __device__ __forceinline__ RealOf<Program> number(long long group, int place) const {
    const long long at = group + first_group(few);
    const auto* here = reinterpret_cast<const RealOf<Program>*>(few.of + at);
    const auto* there = reinterpret_cast<const RealOf<Program>*>(many + at);
    return many == nullptr ? here[place] : __ldg(there + place);
  }

  // Returns those of a variable, given each one's group.
  __device__ __forceinline__ ScalarsOf<Program> of_variable(unsigned int variable,
                                                            const long long* groups) const {
    return of(__ldg(&groups[variable]));
  }
};

// Those of the only group.
template <class Program>
struct GroupScalars<Program, ScalarsOf<Program>> {
  const ScalarsOf<Program>& only;
  const ScalarsOf<Program>* many;  // not read

  __device__ __forceinline__ const ScalarsOf<Program>& given(long long) const { return only; }
  __device__ __forceinline__ const ScalarsOf<Program>& of(long long) const { return only; }
  __device__ __forceinline__ RealOf<Program> number(long long, int place) const {
    return reinterpret_cast<const RealOf<Program>*>(&only)[place];
  }
  __device__ __forceinline__ const ScalarsOf<Program>& of_variable(unsigned int,
                                                                   const long long*) const {
    return only;
  }
};

}  // namespace gpuopt
