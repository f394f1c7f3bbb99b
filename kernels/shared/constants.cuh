// Numbers of which Python has the same. Compiles as CUDA and as plain C++17.
// Written by .venv/bin/python tests/support/structs_header.py.
#pragma once

namespace gpuopt {

// gpuopt/backends/cuda/launch_shapes.py.
constexpr int warp_size = 32;
constexpr int tile_size = 1024;
constexpr int pack_bytes = 16;
constexpr int dense_threads = 256;
constexpr int sort_threads = 256;
constexpr int shares_per_group = 16;
constexpr int few_rows = 2048;
constexpr int digit_bits = 8;
constexpr int num_digits = 256;
constexpr int row_threads = 128;
constexpr int piece_threads = 512;
constexpr int clip_threads = 256;
constexpr int clip_chunk = 16384;
constexpr int measured_rows = 256;
constexpr int copy_threads = 256;
constexpr int copy_chunk = 4096;
constexpr int lane_codes = 8;
constexpr int power_bits = 8;
constexpr int num_powers = 1024;

// gpuopt/backends/row_order.py.
constexpr int piece_size = 32;
constexpr int pieces_per_stretch = 16;
constexpr int stretch_size = 512;
constexpr int rows_per_word = 32;

// `ClipForm` in gpuopt/backends/clips.py.
constexpr int clip_tensorflow = 0;
constexpr int clip_torch = 1;
constexpr int clip_apex = 2;

// `Clipping` in gpuopt/backends/norms.py.
constexpr int clip_by_global_norm = 0;
constexpr int clip_by_norm = 1;
constexpr int clip_by_average_norm = 2;

// `Coding` in gpuopt/rules/slot_codes.py.
constexpr int coding_signed = 0;
constexpr int coding_squares = 1;
constexpr int coding_roots = 2;

// gpuopt/rules/random_bits.py.
constexpr int num_key_parts = 4;

// gpuopt/backends/cuda/structs.py.
constexpr double nothing_is_wrong = 0x1.0000000000000p+53;

}  // namespace gpuopt
