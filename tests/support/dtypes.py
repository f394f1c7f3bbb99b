"""The types that variables have."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

DTYPES = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
DTYPES_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
# Those that kernels are tested with. Under a sanitizer, under which they take four times as long to
# compile, these are a narrow one and a wide one, unless all are asked for.
_SOME = os.environ.get("GPUOPT_EMULATOR_SANITIZE") and not os.environ.get("GPUOPT_ALL_KERNELS")
TYPES_OF_KERNELS = ["float16", "float32"] if _SOME else [*DTYPES_BY_NAME]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
