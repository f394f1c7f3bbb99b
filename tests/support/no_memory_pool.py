"""A pytest plugin that turns CuPy's memory pool off: memory checkers then see where arrays end."""

import cupy

cupy.cuda.set_allocator(None)
