// In the place of Thrust's, of which CuPy 13 needs two names where no NVRTC compiles.
#pragma once
#define THRUST_NAMESPACE_BEGIN namespace thrust {
#define THRUST_NAMESPACE_END }
