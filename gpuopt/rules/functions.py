"""The numpy functions that update rules may call, with their C++."""

from __future__ import annotations

import re

# By the names of numpy's types: C++'s. `numpy::` is a namespace of kernels/shared/numpy.cuh.
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
# These take integers, too, and some of them numbers of truth.
OF_INTEGERS = frozenset(
    {"absolute", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "invert"}
    | {"left_shift", "maximum", "minimum", "positive", "power", "remainder", "right_shift"}
    | {"sign", "square"}
)
# These take words of 64 bits, too.
OF_WORDS = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"})

# By the ufunc's name: C++ with a place for each operand.
UFUNCS = {
    **_OPERATORS,
    **{name: f"numpy::{name}({{}})" for name in _OF_ONE.split()},
    **{name: f"numpy::{name}({{}}, {{}})" for name in _OF_TWO.split()},
}
# Libraries compute these, and may differ in the last digits.
INEXACT = frozenset(
    name for name in UFUNCS if re.search("arc|cos|sin|tan|exp|log|power|cbrt|hypot", name)
)
# Of all that a trace has, by its name.
OPERATIONS = {
    **UFUNCS,
    "clip": "numpy::clip({}, {}, {})",
    "select": "{} ? {} : {}",  # np.where, and `if` on a scalar
}
