"""Which cases run of the tests that run one in n of theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from zlib import crc32

import pytest


def draw(items: Sequence[pytest.Item], n: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns about one in n of the cases of all tests with parameters, and the others.

    Every test without parameters is chosen.
    """
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        _, _, case = item.nodeid.partition("[")
        is_drawn = not case or crc32(item.nodeid.encode()) % n == 0
        (chosen if is_drawn else others).append(item)
    return chosen, others


def divide(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the cases that run, and the others.

    About one in n runs, whatever other cases there are; and each value of each parameter in one of
    them at least. Where a parameter has as many values as there are cases, the marker names a
    function for it, `one_in(8, case=kind_of_case)`: values with one result count as one.
    """
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in") is not None:
            by_test[item.nodeid.partition("[")[0]].append(item)
    left_out = {id(item) for cases in by_test.values() for item in _left_out(cases)}
    chosen = [item for item in items if id(item) not in left_out]
    return chosen, [item for item in items if id(item) in left_out]


def _left_out(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases of one test that do not run."""
    others: list[tuple[pytest.Item, set[tuple[str, Hashable]]]] = []
    seen: set[tuple[str, Hashable]] = set()
    for item in cases:
        [n] = _marker_of(item).args
        # By the parameters alone: tests of the same ones share what they compile.
        if crc32(item.nodeid.partition("[")[2].encode()) % n == 0:
            seen |= _values_of(item)
        else:
            others.append((item, _values_of(item)))
    unseen = set().union(*(values for _, values in others)) - seen
    while unseen:  # the case with the most of them runs, too
        most = max(range(len(others)), key=lambda at: len(unseen & others[at][1]))
        unseen -= others.pop(most)[1]
    return [item for item, _ in others]


def _values_of(item: pytest.Item) -> set[tuple[str, Hashable]]:
    # Values need not be hashable; all cases of a test have the same objects.
    keys = _marker_of(item).kwargs
    parameters = item.callspec.params  # type: ignore[attr-defined]
    return {(name, keys.get(name, id)(value)) for name, value in parameters.items()}


def _marker_of(item: pytest.Item) -> pytest.Mark:
    marker = item.get_closest_marker("one_in")
    assert marker is not None
    return marker
