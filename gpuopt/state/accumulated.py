"""The names of gradient accumulation's slots, and errors for states that have them in excess."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

SUM: Final = "gradient_sum"
ROWS: Final = "gradient_rows"
VALUES: Final = "gradient_values"
UNIQUE: Final = "gradient_unique_rows"
COUNT: Final = "accumulated_steps"

_HINT = (
    ": it was saved in the middle of accumulation. Load it by a GradientAccumulationOptimizer, or "
    "save it after the call of apply_accumulated() that ends it"
)


def hint_about(name: str) -> str:
    """Returns the end of the message that refuses a name where nothing accumulates."""
    return _HINT if name in (SUM, ROWS, VALUES, UNIQUE, COUNT) else ""


def is_zero_count(name: str, value: Any) -> bool:
    """Whether a saved number is the count of accumulated steps, and 0."""
    return name == COUNT and not np.any(value)
