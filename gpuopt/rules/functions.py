"""The numpy functions that update rules may call, with their C++."""

from __future__ import annotations

import re

# C++'s types by the names of numpy's. The namespace `numpy` is in kernels/shared/numpy.cuh.
TYPES = {
    **{"bool": "bool", "int64": "numpy::Integer", "uint64": "numpy::Word"},
    **{"float32": "float", "float64": "double"},
}
_OPERATORS = {
    **{"add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "divide": "{} / {}"},
    **{"negative": "-{}", "greater": "{} > {}", "greater_equal": "{} >= {}", "less": "{} < {}"},
    **{"less_equal": "{} <= {}", "equal": "{} == {}", "not_equal": "{} != {}"},
    **{"logical_and": "{} && {}", "logical_or": "{} || {}", "logical_not": "!{}"},
}
_OF_ONE = (
    "absolute arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh exp exp2 expm1 fabs "
    "floor invert isfinite isinf isnan log log10 log1p log2 positive reciprocal rint sign signbit "
    "sin sinh sqrt square tan tanh trunc"
)
_OF_TWO = (
    "arctan2 bitwise_and bitwise_or bitwise_xor copysign float_power floor_divide fmax fmin hypot "
    "left_shift maximum minimum power remainder right_shift"
)
# These also take integers, and some of them booleans.
OF_INTEGERS = frozenset(
    {"absolute", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "invert"}
    | {"left_shift", "maximum", "minimum", "positive", "power", "remainder", "right_shift"}
    | {"sign", "square"}
)
# These also take uint64.
OF_WORDS = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"})

# C++ by the ufunc's name, with a placeholder for each operand.
UFUNCS = {
    **_OPERATORS,
    **{name: f"numpy::{name}({{}})" for name in _OF_ONE.split()},
    **{name: f"numpy::{name}({{}}, {{}})" for name in _OF_TWO.split()},
}
# Libraries compute these, and may differ in the last digits.
INEXACT = frozenset(
    name for name in UFUNCS if re.search("arc|cos|sin|tan|exp|log|power|cbrt|hypot", name)
)
# The same for every operation of a trace.
OPERATIONS = {
    **UFUNCS,
    "clip": "numpy::clip({}, {}, {})",
    "select": "{} ? {} : {}",  # np.where, and `if` on a scalar
}
