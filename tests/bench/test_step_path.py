"""What a report leaves in steps when it is closed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from bench import step_path
from bench.workloads import offer_host_workloads

pytestmark = pytest.mark.internal


def calls_in(step: Any) -> int:
    """Counts the functions that are entered."""
    calls = 0

    def enter(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(enter)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def test_a_closed_report_enters_no_function_in_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_path, "_STEPS", 10)
    workload = step_path._make_steps_after_a_report()
    after, without, looks = workload.contenders.values()
    without()
    calls = calls_in(without)
    assert calls > 100
    assert calls_in(after) == calls
    assert calls_in(looks) < calls / 10
    [offer] = offer_host_workloads(workload.name)
    names = {target.against for target in offer.targets}
    assert names == workload.contenders.keys() - {"gpuopt"}
