// Runs CUDA kernels on a CPU, for tests: include this, then a kernel's source, in g++ -std=c++20.
//
// Values, synchronisation and bounds are those of a GPU; speed and memory are not. Blocks run one
// after another. A block's threads run as fibers of one operating-system thread and switch only
// where they wait for each other, so a kernel without barriers costs a plain call per thread. A
// seed chooses random orders of blocks and threads. AddressSanitizer and ThreadSanitizer see each
// CUDA thread as a thread of its own.
#pragma once

#include "intrinsics.h"
#include "launch.h"

#undef __global__
#define __global__ __attribute__((noinline))
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

// shared_memory.ld gathers them, so that each block can be given fresh ones.
#undef __shared__
#define __shared__ static

#define threadIdx (::emulator::current->index)
#define blockIdx (::emulator::block_index)
#define blockDim (::emulator::block_shape)
#define gridDim (::emulator::grid_shape)
