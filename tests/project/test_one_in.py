"""Tests marked `one_in(n)` run about one in n of their cases, with each value of a parameter."""

from __future__ import annotations

import os
from itertools import product
from types import SimpleNamespace
from typing import Any

import one_in
import pytest

pytestmark = pytest.mark.internal


def case(test: str, n: int | None, keys: Any = (), **params: int) -> Any:
    marker = None if n is None else pytest.mark.one_in(n, **dict(keys)).mark
    return SimpleNamespace(
        nodeid=f"{test}[{'-'.join(map(str, params.values()))}]",
        get_closest_marker=lambda name: marker,
        callspec=SimpleNamespace(params=params),
    )


def test_one_in_n_runs_and_each_value_in_one_at_least() -> None:
    cases = [case("test", 4, a=a, b=b) for a, b in product(range(40), range(4))]
    chosen, others = one_in.divide(cases)
    assert 160 / 6 <= len(chosen) <= 160 / 2
    assert len(chosen) + len(others) == 160
    for name, number in (("a", 40), ("b", 4)):
        assert {each.callspec.params[name] for each in chosen} == set(range(number))
    again, _ = one_in.divide(cases)
    assert again == chosen


def test_few_cases_have_all_values() -> None:
    cases = [case("test", 10**6, a=a, b=b, c=c) for a, b, c in product(range(6), repeat=3)]
    chosen, _ = one_in.divide(cases)
    assert len(chosen) == 6
    assert [each for each in cases if each in chosen] == chosen


def test_values_that_a_function_calls_alike_count_as_one() -> None:
    keys = {"a": lambda a: a % 3}
    cases = [case("test", 1000, keys, a=a, b=b) for a, b in product(range(40), range(4))]
    chosen, _ = one_in.divide(cases)
    assert len(chosen) <= 8
    assert {each.callspec.params["a"] % 3 for each in chosen} == set(range(3))
    assert {each.callspec.params["b"] for each in chosen} == set(range(4))


def test_tests_are_divided_apart_and_others_run_whole() -> None:
    cases = [case("a", 1000, number=0), case("b", 1000, number=0), case("b", 1000, number=0)]
    cases += [case("c", None, number=number) for number in range(5)]
    chosen, others = one_in.divide(cases)
    assert chosen == [*cases[:2], *cases[3:]]
    assert others == [cases[2]]


def test_of_all_tests_some_cases_may_be_drawn() -> None:
    cases = [case("a", None, number=number) for number in range(4000)]
    alone = SimpleNamespace(nodeid="tests/test_b.py::test_b")
    chosen, others = one_in.draw([*cases, alone], 8)
    assert alone in chosen
    assert 400 < len(chosen) < 600
    assert len(chosen) + len(others) == 4001
    assert one_in.draw(cases, 1) == (cases, [])


@pytest.mark.skipif(bool(os.environ.get("GPUOPT_FULL")), reason="all cases run")
@pytest.mark.one_in(8)
@pytest.mark.parametrize("one", [[], [1], [2], [3]], ids=str)
@pytest.mark.parametrize("other", range(20))
def test_pytests_own_cases_are_divided(
    one: list[int], other: int, request: pytest.FixtureRequest
) -> None:
    test = request.node.nodeid.partition("[")[0]
    if request.config.option.one_in > 1:
        pytest.skip("cases are drawn by --one-in")
    if request.config.option.keyword or any("::" in each for each in request.config.args):
        pytest.skip("somebody named what to run")
    run = [each for each in request.session.items if each.nodeid.startswith(f"{test}[")]
    assert 20 <= len(run) < 40
