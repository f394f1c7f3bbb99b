"""Recognises a call that is given the very objects of the call before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any


class Repeat(threading.local):
    """What one optimizer was given last, in each thread.

    A model has thousands of gradients. Who writes them into the same arrays in every step need not
    have them looked at again. Nothing is kept alive: a new object may get the address of an old
    one, so objects that come twice are watched from then on.

    Attributes:
        token: The same object for as long as the same pairs are given, or None if they may change.
        is_again: Whether they were given before, under this token.
        slots_version: That of the slots for which `kept` holds, or None.
        kept: What an optimizer has found out about these pairs.
    """

    token: list[weakref.ref[Any]] | None = None
    is_again = False
    slots_version: int | None = None
    kept: Any = None
    _ids: tuple[int, ...] = ()

    def sees(self, pairs: Sequence[tuple[Any, ...]]) -> bool:
        """Says whether these very pairs were given the last time, and were watched since."""
        try:
            ids = tuple(map(id, chain.from_iterable(pairs)))
        except TypeError:  # no pairs
            ids = ()
        if not ids or ids != self._ids:
            self._forget()
            self._ids = ids
        elif not self.token:
            self._forget()
            self._watch(pairs)
        else:
            self.is_again = True
        return self.is_again

    def forget(self) -> None:
        """Has the next call looked at in any case."""
        self._ids = ()
        self._forget()

    def keep(self, found: Any, slots_version: int) -> None:
        """Keeps what was found out until something else is given."""
        if self.token is not None:
            self.kept, self.slots_version = found, slots_version

    def _watch(self, pairs: Sequence[tuple[Any, ...]]) -> None:
        token: list[weakref.ref[Any]] = []
        gone = partial(_clear, token)
        try:
            token.extend(weakref.ref(each, gone) for each in chain.from_iterable(pairs))
        except TypeError:  # lists and numbers cannot be watched
            return
        self.token = token

    def _forget(self) -> None:
        self.token = self.slots_version = self.kept = None
        self.is_again = False


def _clear(token: list[weakref.ref[Any]], dead: weakref.ref[Any]) -> None:
    token.clear()
