"""Names of variables: unique among live variables, and fixed when they are first asked for."""

from __future__ import annotations

import gc
import itertools
import time
import weakref

from gpuopt.locks import Lock

# Of the time, the part that collections of garbage may take: one in so many.
_REST_PER_COLLECTION = 20

# Reentrant: a garbage collection inside a guarded block may run Python code on the same thread.
_guard = Lock("the names of variables")
_named: weakref.WeakValueDictionary[str, Name] = weakref.WeakValueDictionary()
# In order of creation.
_not_fixed: weakref.WeakValueDictionary[int, Name] = weakref.WeakValueDictionary()
_serials = itertools.count()
_next_collection = 0.0


class Name:
    """A variable's name, which gets a suffix if a live variable has it.

    It is not fixed before somebody asks: in `w = Variable(value, name="w")`, the old `w` is alive
    until the new one takes its place, and would have the name. When the first one asks, the names
    of all variables so far are fixed in the order in which these were made, so that nothing depends
    on whose name is read first.

    Attributes:
        is_given: Whether the user chose the name of a variable, not gpuopt that of a slot, say.
    """

    __slots__ = ("__weakref__", "_next_suffix", "_serial", "_text", "_wanted", "is_given")

    def __init__(self, wanted: str, is_given: bool) -> None:
        self.is_given = is_given
        self._wanted = wanted
        self._text: str | None = None
        self._next_suffix = 1
        self._serial = next(_serials)
        _not_fixed[self._serial] = self

    @property
    def text(self) -> str:
        """The name."""
        if self._text is None:
            _fix_all()
            assert self._text is not None
        return self._text

    def fix(self) -> None:
        """Gives the variable its name; if Ctrl-C ends this, the next call gives it the same."""
        if self._text is None:
            text = _free_name(self._wanted, self)
            _named[text] = self
            namesake = _named.get(self._wanted)
            if namesake is not None and namesake is not self:
                # Makes a thousand variables of one name cheap; it goes with the first of them.
                namesake._next_suffix = int(text[len(self._wanted) + 1 :])
            self._text = text
        _not_fixed.pop(self._serial, None)

    def is_waiting_for_garbage(self) -> bool:
        """Whether garbage that Python has not collected yet may have the name."""
        return self.is_given and self._text is None and self._wanted in _named

    def __str__(self) -> str:
        return f'variable "{self.text}"'


def unique_name(name: str) -> str:
    """Returns `name`, or the name with the suffix that a new variable of this name would get."""
    _fix_all()
    return _free_name(name)


def _fix_all() -> None:
    if any(name.is_waiting_for_garbage() for name in _in_order()):
        _collect_garbage()
    with _guard:
        for name in _in_order():
            name.fix()


def _in_order() -> list[Name]:
    living = (reference() for reference in _not_fixed.valuerefs())
    return [name for name in living if name is not None]


def _collect_garbage() -> None:
    """Collects variables in cycles, which have died and keep their names, if it is worth the time.

    A model that refers to itself would otherwise keep its variables' names until Python collects
    garbage by itself, at a moment that depends on all that a program does.
    """
    global _next_collection
    began = time.monotonic()
    if gc.isenabled() and began >= _next_collection:
        gc.collect()
        ended = time.monotonic()
        _next_collection = ended + _REST_PER_COLLECTION * (ended - began)


def _free_name(wanted: str, whose: Name | None = None) -> str:
    with _guard:
        namesake = _named.get(wanted)
        if namesake is None or namesake is whose:
            return wanted
        suffix = namesake._next_suffix
        while _named.get(f"{wanted}_{suffix}") not in (None, whose):
            suffix += 1
        return f"{wanted}_{suffix}"
