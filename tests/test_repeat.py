"""Who is given the same objects again is told so, and never of objects that have gone."""

from __future__ import annotations

from typing import Any

import pytest

import gpuopt.repeat
from gpuopt.repeat import Repeat


class Thing:
    """Can be watched."""


def things(number: int) -> list[Thing]:
    return [Thing() for _ in range(number)]


def test_pairs_are_known_when_they_come_again() -> None:
    gradients, variables = things(3), things(3)
    repeat = Repeat()
    given = list(zip(gradients, variables, strict=True))
    assert repeat.sees(given) is None
    assert repeat.sees(given) is None
    repeat.keep("found")
    assert repeat.sees(given) == tuple(gradients)
    assert (repeat.is_again, repeat.kept) == (True, "found")
    token = repeat.token
    assert repeat.sees(list(given))
    assert repeat.token is token is not None


def test_new_gradients_of_known_variables_are_told_apart() -> None:
    variables = things(2)
    repeat = Repeat()
    tokens = []
    for gradients in [things(2)] * 3 + [things(2)] * 3:
        seen = repeat.sees(list(zip(gradients, variables, strict=True)))
        repeat.keep("found")
        tokens.append((seen is not None, repeat.is_again, repeat.token is not None))
    assert tokens == [
        *((False, False, False), (False, False, True), (True, True, True)),
        *((True, False, False), (True, False, True), (True, True, True)),
    ]


@pytest.mark.parametrize("position", [0, 1], ids=["gradient", "variable"])
def test_an_object_in_the_place_of_one_that_has_gone_is_a_new_one(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = things(2)
    repeat = Repeat()
    for _ in range(3):
        repeat.sees([(pair[0], pair[1])])
        repeat.keep("found")
    assert repeat.is_again
    # When memory is given out again is the interpreter's affair.
    address = id(pair[position])
    pair[position] = new = Thing()
    monkeypatch.setattr(
        gpuopt.repeat, "id", lambda each: address if each is new else id(each), raising=False
    )
    assert (repeat.sees([(pair[0], pair[1])]) is None) == (position == 1)
    assert not repeat.is_again


def test_what_was_found_goes_with_the_first_variable() -> None:
    gradients, variables, found = things(2), things(2), Thing()
    repeat = Repeat()
    for _ in range(3):
        repeat.sees(list(zip(gradients, variables, strict=True)))
        repeat.keep(found)
    assert repeat.kept is found
    del variables[1]
    assert repeat.kept is None


@pytest.mark.parametrize(
    "given",
    [[], [()], [(1, 2, 3)], [(1, 2), (1,)], [[1, 2]], "ab", [iter((1, 2))], [(1, 2)], [(1.5, 2)]],
    ids=str,
)
def test_what_cannot_be_watched_is_never_known(given: Any) -> None:
    repeat = Repeat()
    for _ in range(4):
        assert repeat.sees(given) is None
        repeat.keep("found")
        assert not repeat.is_again
    if given and type(given[0]).__name__ == "tuple_iterator":
        assert list(given[0]) == [1, 2]
