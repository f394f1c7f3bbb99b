// A rule whose scalars are those of the count of steps, which the device alone knows: where steps
// of a scaled loss are left out. Mirrors `scaled` in gpuopt/rules/scaled.py.
#pragma once

namespace gpuopt {

template <class Rule>
struct Scaled : Rule {
  static constexpr bool is_scaled = true;
};

}  // namespace gpuopt
