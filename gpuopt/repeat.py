"""Recognises a call that is given the objects of the call before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any


class Watched:
    """Objects, for as long as all of them live.

    Attributes:
        are_alive: Whether they do.
        kept: What is known of them; it goes with the first of them.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.are_alive = True
        self.kept: Any = None
        gone = partial(_forget, weakref.ref(self))
        self._references = [weakref.ref(each, gone) for each in objects]

    def forget(self) -> None:
        self.are_alive = False
        self.kept = None
        self._references = []


def _forget(watched: weakref.ref[Watched], dead: weakref.ref[Any]) -> None:
    living = watched()
    if living is not None:
        living.forget()


class Repeat(threading.local):
    """What one optimizer was given last, in each thread.

    A model has thousands of variables, which are the same in each step, and so may be the arrays of
    their gradients: they need not be looked at again. Nothing is kept alive. As a new object may
    get the address of an old one, objects that come twice are watched from then on.

    Attributes:
        token: The same object for as long as the same gradients are given, or None.
        is_again: Whether they were given before, under this token.
    """

    token: Watched | None = None
    is_again = False
    _variables: Watched | None = None
    _variable_ids: tuple[int, ...] = ()
    _gradient_ids: tuple[int, ...] = ()

    def sees(self, pairs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Returns the gradients if these are the last call's variables and something is `kept`."""
        self.is_again = False
        try:
            gradients, variables = zip(*_tuples(pairs), strict=True)
        except ValueError:  # not pairs
            self.forget()
            return None
        ids = tuple(map(id, variables))
        if ids != self._variable_ids:
            self.forget()
            self._variable_ids, self._gradient_ids = ids, tuple(map(id, gradients))
            return None
        if self._variables is None or not self._variables.are_alive:
            self.token = None
            self._variables = _watched(variables)
        ids = tuple(map(id, gradients))
        if ids != self._gradient_ids:
            self.token = None
            self._gradient_ids = ids
        elif self.token is None or not self.token.are_alive:
            self.token = _watched(gradients)
        else:
            self.is_again = True
        return None if self.kept is None else gradients

    @property
    def kept(self) -> Any:
        """What was found out about the variables, or None."""
        return None if self._variables is None else self._variables.kept

    def keep(self, found: Any) -> None:
        """Keeps what was found out for as long as the same variables are given, and live."""
        if self._variables is not None and self._variables.are_alive:
            self._variables.kept = found

    def forget(self) -> None:
        """Has the next call looked at in any case."""
        self.token = self._variables = None
        self.is_again = False
        self._variable_ids = self._gradient_ids = ()


def _tuples(pairs: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
    """Leaves out everything unless all are tuples: iterators can be looked at only once."""
    return pairs if set(map(type, pairs)) == {tuple} else ()


def _watched(objects: Iterable[Any]) -> Watched | None:
    try:
        return Watched(objects)
    except TypeError:  # lists and numbers cannot be watched
        return None
