// What NVRTC knows without being told, for CUDA sources that g++ compiles.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "cuda_emu.h"

using std::signbit;

#define __CUDACC_VER_MAJOR__ 13
#define assert(condition) ((condition) ? void() : ::emulator::fail("assert(%s)", #condition))

// The GPU's clock: the driver's, which is told how to be asked after loading.
extern "C" __attribute__((used)) inline unsigned long long (*driver_timer)() = nullptr;
