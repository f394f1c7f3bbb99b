// In which order a row's gradients are added up, on every device.
// Mirrors gpuopt/backends/row_order.py.
#pragma once

namespace gpuopt {

constexpr int piece_size = 32;
constexpr int pieces_per_stretch = 16;
constexpr int stretch_size = pieces_per_stretch * piece_size;

}  // namespace gpuopt
