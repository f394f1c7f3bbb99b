"""Time limits of waits for other workers, and waits that leave the core to others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

# Long enough for a slow step; short enough that a hung worker is found out the same minute.
DEFAULT_TIMEOUT_S = 60.0

# A yield to a busy process takes milliseconds, and most messages come sooner than a sleep's end.
_SPINS_BEFORE_YIELD = 50
_YIELDS_BEFORE_SLEEP = 200
# With fewer cores than ranks, a rank that spins keeps the one it waits for from its core.
_SPINS_WITHOUT_CORE = 2
_SHORTEST_SLEEP_S = 20e-6
# Of the wait since something came: a message that comes during a sleep is late by little, and few
# sleeps end without one.
_SLEEP_PART = 1 / 16

LONGEST_SLEEP_S = 1e-3
# While blocks are under way, MPI needs to be called to move them.
LONGEST_SLEEP_IN_TRANSFER_S = 100e-6

_logger = logging.getLogger("gpuopt")
_yield_core: Callable[[], object] = getattr(os, "sched_yield", partial(time.sleep, 0))


def check_timeout(timeout_s: float) -> float:
    """Returns the time limit.

    Raises:
        ValueError: `timeout_s` is not a limited number of seconds above 0.
    """
    if not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s must be a limited number of seconds above 0, got {timeout_s}")
    return timeout_s


class WaitForRanks:
    """One wait for other processes, which may need this one's core.

    Attributes:
        what: Describes the call that waits.
    """

    def __init__(self, what: str, timeout_s: float, has_core: bool = True) -> None:
        """Begins to wait.

        Args:
            what: Describes the call that waits.
            timeout_s: How long, in seconds.
            has_core: Whether there is a core for each rank of this host; else it soon sleeps.
        """
        self.what = what
        self._num_spins = _SPINS_BEFORE_YIELD if has_core else _SPINS_WITHOUT_CORE
        self._num_quick = self._num_spins + (_YIELDS_BEFORE_SLEEP if has_core else 0)
        self._timeout_s = timeout_s
        self._began = self._latest = time.monotonic()
        self._has_warned = False
        self._num_pauses = 0

    def note_arrival(self) -> None:
        """Has the next pauses be short again: something has come, and the rest will be soon."""
        self._num_pauses = 0
        self._latest = time.monotonic()

    def pause(
        self, longest_s: float, missing: Sequence[int] | Callable[[], Sequence[int]] = ()
    ) -> bool:
        """Returns at once, then yields the core, and later sleeps for longer and longer.

        Args:
            longest_s: The longest sleep.
            missing: Who is waited for, or how to find out; logged when half of the time is over.

        Returns:
            False, without a pause, if the time is over.
        """
        self._num_pauses += 1
        if self._num_pauses <= self._num_spins:
            return True
        now = time.monotonic()
        waited = now - self._began
        if waited >= self._timeout_s:
            return False
        if missing and not self._has_warned and waited >= self._timeout_s / 2:
            self._has_warned = True
            missing = missing() if callable(missing) else missing
            ranks = ", ".join(map(str, missing))
            _logger.warning("%s: waiting for rank %s since %.3g s", self.what, ranks, waited)
        if self._num_pauses <= self._num_quick:
            _yield_core()
        else:
            since_arrival = now - self._latest
            time.sleep(min(max(_SLEEP_PART * since_arrival, _SHORTEST_SLEEP_S), longest_s))
        return True
