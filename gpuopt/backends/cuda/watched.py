"""Watches whether Python objects live, since a new object may get the id of one that is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any


class Watched:
    """Objects whose ids stand for them as long as all of them live; none is kept alive.

    Attributes:
        are_alive: Whether all of the objects live.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.are_alive = True
        gone = partial(_note_end, weakref.ref(self))
        self._references = [weakref.ref(each, gone) for each in objects]


def _note_end(watched: weakref.ref[Watched], dead: weakref.ref[Any]) -> None:
    living = watched()
    if living is not None:
        living.are_alive = False
        living._references = []
