"""Which cases run of the tests that run one in n of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest


def divide(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the cases that run, and the others.

    Of each n cases that follow each other, one runs, and each time it is the next one: where n is
    the number of a parameter's values, all of them occur.
    """
    places: Counter[str] = Counter()
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None:
            chosen.append(item)
            continue
        [n] = marker.args
        test = item.nodeid.partition("[")[0]
        group, place = divmod(places[test], n)
        (chosen if place == group % n else others).append(item)
        places[test] += 1
    return chosen, others
