"""Variables for tests with the fixture `xp`, which run on the host and on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt import Variable


def variable_on(xp: Any, start: np.ndarray, **named: str) -> Variable:
    return Variable(start, device="cpu" if xp is np else "gpu:0", **named)
