"""Waits for other processes leave the core to those who need it."""

from __future__ import annotations

import time

import pytest

from gpuopt.distributed.waiting import WaitForRanks


@pytest.mark.parametrize(("has_core", "most"), [(True, 1000), (False, 10)])
def test_a_wait_soon_sleeps_where_ranks_share_cores(
    has_core: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    waiting = WaitForRanks("a call", 60.0, has_core)
    pauses = 0
    while not slept:
        assert waiting.pause(1e-3)
        pauses += 1
    assert pauses <= most
    assert (pauses > 10) == has_core
