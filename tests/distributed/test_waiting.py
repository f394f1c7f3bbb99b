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


def test_a_rank_that_sleeps_comes_late_by_a_small_part_of_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    slept: list[tuple[float, float]] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append((now, seconds))
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    waiting = WaitForRanks("a call", 60.0, has_core=False)
    while now < 1.0:
        assert waiting.pause(1e-3)
    assert all(seconds <= max(waited / 4, 50e-6) for waited, seconds in slept)
    # It wakes up about a thousand times a second, and no more than a hundred times before that.
    assert len(slept) < 1100
    assert max(seconds for _, seconds in slept) == 1e-3


def test_a_wait_ends_in_time_where_others_take_the_core_at_each_yield(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def monotonic() -> float:  # each look comes after a yield
        nonlocal now
        now += 4e-3
        return now

    monkeypatch.setattr(time, "monotonic", monotonic)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it sleeps"))
    waiting = WaitForRanks("a call", 0.05)
    while waiting.pause(1e-3):
        pass
    assert 0.05 <= now < 0.06


def test_pauses_are_short_again_when_something_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    waiting = WaitForRanks("a call", 1.0, has_core=False)
    while now < 0.5:
        waiting.pause(1e-3)
    waiting.note_arrival()
    slept.clear()
    num_quick = 0
    while not slept:
        num_quick += 1
        assert waiting.pause(1e-3)
    assert num_quick > 1
    assert slept[0] < 50e-6
    # But the time limit is that of the whole call.
    while waiting.pause(1e-3):
        pass
    assert 1.0 <= now < 1.01
