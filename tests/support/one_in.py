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
    # Values need not be hashable; all cases of a test have the same objects.
    seen: dict[str, set[tuple[str, Hashable]]] = defaultdict(set)
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            chosen.append(item)
            continue
        [n] = marker.args
        # By the parameters alone: tests of the same ones share what they compile.
        test, _, case = item.nodeid.partition("[")
        of_test = seen[test]
        parameters = item.callspec.params  # type: ignore[attr-defined]
        values = {(name, marker.kwargs.get(name, id)(value)) for name, value in parameters.items()}
        if crc32(case.encode()) % n == 0 or not values <= of_test:
            chosen.append(item)
            of_test |= values
        else:
            others.append(item)
    return chosen, others
