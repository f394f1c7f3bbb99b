"""Time limits of waits for other workers."""

from __future__ import annotations

import threading

# Long enough for a slow step; short enough that a hung worker is found out the same minute.
DEFAULT_TIMEOUT_S = 60.0


def check_timeout(timeout_s: float) -> float:
    """Returns the time limit.

    Raises:
        ValueError: `timeout_s` is not a limited number of seconds above 0.
    """
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s must be a limited number of seconds above 0, got {timeout_s}")
    return timeout_s
