"""Which cases run of the tests that run one in n of theirs.

They are chosen before pytest makes tests of them, which takes as long as to run a short one. A case
is pytest's: the `id`, the parameters and the markers that a test will have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import CodeType
from typing import Any
from zlib import crc32


def draw(test: str, cases: Sequence[Any], n: int) -> list[Any]:
    """Returns about one in n of the cases of a test, or none."""
    return [case for case in cases if is_drawn(f"{test}[{case.id}]", n)]


def is_drawn(test: str, n: int) -> bool:
    """Whether a test is one of about one in n of all with parameters, or has none."""
    return "[" not in test or crc32(test.encode()) % n == 0


def divide(
    cases: Sequence[Any], n: int, keys: Mapping[str, Callable[[Any], Hashable]]
) -> list[Any]:
    """Returns the cases of a test that run.

    About one in n runs, whatever other cases there are; and each value of each parameter in one of
    them at least. Where a parameter has as many values as there are cases, the marker names a
    function for it, `one_in(8, case=kind_of_case)`: values with one result count as one.
    """
    chosen: list[Any] = []
    others: list[tuple[Any, set[tuple[str, Hashable]]]] = []
    seen: set[tuple[str, Hashable]] = set()
    for case in cases:
        # Values need not be hashable; all cases of a test have the same objects.
        values = {(name, keys.get(name, id)(value)) for name, value in case.params.items()}
        # By the parameters alone: tests of the same ones share what they compile.
        if crc32(f"{case.id}]".encode()) % n == 0:
            chosen.append(case)
            seen |= values
        else:
            others.append((case, values))
    unseen = set().union(*(values for _, values in others)) - seen
    while unseen:  # the case with the most of them runs, too
        most = max(range(len(others)), key=lambda at: len(unseen & others[at][1]))
        case, values = others.pop(most)
        unseen -= values
        chosen.append(case)
    are_chosen = set(map(id, chosen))
    return [case for case in cases if id(case) in are_chosen]


def compiled(expression: str) -> CodeType | None:
    """Returns what `-m` selects by, if it has nothing but names of markers."""
    if re.fullmatch(r"[\w\s()]+", expression) is None:
        return None
    return compile(expression, "-m", "eval")


def selects(expression: CodeType, markers: Collection[str]) -> bool:
    names = {name: name in markers for name in expression.co_names}
    return bool(eval(expression, {"__builtins__": {}}, names))
