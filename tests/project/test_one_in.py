"""Tests marked `one_in(n)` run one in n of their cases, by turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import one_in
import pytest


def case(test: str, number: int, n: int | None) -> Any:
    marker = None if n is None else pytest.mark.one_in(n).mark
    return SimpleNamespace(nodeid=f"{test}[{number}]", get_closest_marker=lambda name: marker)


def names(items: list[Any]) -> list[str]:
    return [item.nodeid for item in items]


def test_one_in_n_runs_and_each_time_the_next() -> None:
    cases = [case("a", number, 3) for number in range(10)]
    chosen, others = one_in.divide(cases)
    assert names(chosen) == ["a[0]", "a[4]", "a[8]", "a[9]"]
    assert len(others) == 6


def test_tests_are_counted_apart_and_others_run_whole() -> None:
    cases = [each for i in range(4) for each in (case("a", i, 2), case("b", i, None))]
    cases += [case("c", 7, 2)]
    chosen, others = one_in.divide(cases)
    assert names(chosen) == ["a[0]", "b[0]", "b[1]", "b[2]", "a[3]", "b[3]", "c[7]"]
    assert names(others) == ["a[1]", "a[2]"]
