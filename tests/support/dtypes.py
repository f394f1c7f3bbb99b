"""The types that variables have."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

DTYPES = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
DTYPES_BY_NAME = {dtype.name: dtype for dtype in DTYPES}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
