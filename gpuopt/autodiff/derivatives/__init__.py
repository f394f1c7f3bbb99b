"""The derivatives that losses take of numpy's functions, where autograd's own will not do.

autograd's make float64 of float32 on the way, bring a device's arrays to the host, or ignore
arguments. Ours are looked up by our own nodes alone, so that nothing changes for other code that
uses autograd.
"""

from gpuopt.autodiff.derivatives import (  # noqa: F401 - each fills the table
    differences,
    elementwise,
    fourier,
    indexing,
    joining,
    linear_algebra,
    products,
    reductions,
    shapes,
)
from gpuopt.autodiff.derivatives.registry import (
    call_composition,
    derivative,
    leave_out_defaults,
    make_vjps,
    parameters_of,
    refuse_argument,
    refuse_function,
)

__all__ = [
    "call_composition",
    "derivative",
    "leave_out_defaults",
    "make_vjps",
    "parameters_of",
    "refuse_argument",
    "refuse_function",
]
