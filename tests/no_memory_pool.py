"""A pytest plugin: each of CuPy's arrays is an allocation, so that memory checkers see its ends."""

import cupy

cupy.cuda.set_allocator(None)
