"""Names of variables: unique among live variables, and fixed by their first use."""

from __future__ import annotations

import gc
import itertools
import time
import weakref

from gpuopt.locks import Lock

# Of the time, the share that collections of garbage may take: of those that change no name, so that
# loops which keep many variables of one name stay quick; and of those that do, so that names are
# the same where a model is made again after as long as a collection takes.
_SHARE = 0.05
_SHARE_OF_USEFUL = 0.5
# How many that change no name may come one after the other; of useful ones, ten times as many.
_MOST_SAVED_UP = 3.0

# Reentrant: a garbage collection inside a guarded block may run Python code on the same thread.
_guard = Lock("the names of variables")
_named: weakref.WeakValueDictionary[str, Name] = weakref.WeakValueDictionary()
# In order of creation.
_not_fixed: weakref.WeakValueDictionary[int, Name] = weakref.WeakValueDictionary()
_serials = itertools.count()


class Name:
    """A variable's name, which gets a suffix if a live variable has it.

    It is not fixed before somebody asks: in `w = Variable(value, name="w")`, the old `w` is alive
    until the new one takes its place, and would have the name. When the first one asks, the names
    of all variables so far are fixed in the order in which these were made, so that nothing depends
    on whose name is read first.

    Attributes:
        is_given: Whether the user chose the name of a variable, not gpuopt that of a slot, say.
    """

    __slots__ = (
        "__weakref__",
        "_followers",
        "_last_suffix",
        "_num_followers",
        "_serial",
        "_text",
        "_wanted",
        "is_given",
    )

    def __init__(self, wanted: str, is_given: bool) -> None:
        self.is_given = is_given
        self._wanted = wanted
        self._text: str | None = None
        # Names that are this one with a suffix; None while there is only the first.
        self._followers: weakref.WeakSet[Name] | None = None
        self._num_followers = 0
        self._last_suffix = 1
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
                namesake._add_follower(self, int(text[len(self._wanted) + 1 :]))
            self._text = text
        _not_fixed.pop(self._serial, None)

    def is_waiting_for_garbage(self) -> bool:
        """Whether garbage that Python has not collected yet may have the name."""
        return self.is_given and self._text is None and self._wanted in _named

    def find_taken_suffix(self) -> int:
        """Returns a suffix below which none is free, or 1 where one may have become free.

        So a thousand variables of one name are cheap; it goes with the first of them.
        """
        has_lost_one = self._followers is not None and len(self._followers) < self._num_followers
        return 1 if has_lost_one else self._last_suffix

    def __str__(self) -> str:
        return f'variable "{self.text}"'

    def _add_follower(self, name: Name, suffix: int) -> None:
        if self._followers is None and suffix > 1:
            earlier = (_named.get(f"{name._wanted}_{each}") for each in range(1, suffix))
            self._followers = weakref.WeakSet(each for each in earlier if each is not None)
        if self._followers is not None:
            self._followers.add(name)
            self._num_followers = len(self._followers)
        self._last_suffix = suffix


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


def _collect_garbage() -> None:
    """Collects variables in cycles, which have died and keep their names, if it is worth the time.

    A model that refers to itself would otherwise keep its variables' names until Python collects
    garbage by itself, at a moment that depends on all that a program does. All generations: an
    earlier collection here has made the model old when it was new.
    """
    if gc.isenabled() and _allowance.is_left():
        began = time.monotonic()
        without = _names_with_suffixes()
        gc.collect()
        is_useful = _names_with_suffixes() != without
        _allowance.spend(time.monotonic() - began, is_useful)


def _names_with_suffixes() -> list[str]:
    """Returns the names of variables that cannot have those that were wanted."""
    waiting = (name for name in _in_order() if name.is_waiting_for_garbage())
    return [_free_name(name._wanted, name) for name in waiting]


def _in_order() -> list[Name]:
    living = (reference() for reference in _not_fixed.valuerefs())
    return [name for name in living if name is not None]


def _free_name(wanted: str, whose: Name | None = None) -> str:
    with _guard:
        namesake = _named.get(wanted)
        if namesake is None or namesake is whose:
            return wanted
        suffix = namesake.find_taken_suffix()
        while _named.get(f"{wanted}_{suffix}") not in (None, whose):
            suffix += 1
        return f"{wanted}_{suffix}"


class _Allowance:
    """How many collections of garbage may be made now: more, the more time has passed."""

    def __init__(self) -> None:
        self._left = _MOST_SAVED_UP
        self._seconds_for_one = 1.0
        self._counted_until = time.monotonic()

    def is_left(self) -> bool:
        """Whether a collection may begin, however long it takes."""
        now = time.monotonic()
        earned = _SHARE * (now - self._counted_until) / self._seconds_for_one
        self._left = min(self._left + earned, _MOST_SAVED_UP)
        self._counted_until = now
        return self._left > 0.0

    def spend(self, seconds: float, is_useful: bool) -> None:
        """Counts a collection that took so long."""
        self._left -= _SHARE / _SHARE_OF_USEFUL if is_useful else 1.0
        # Some systems' clocks move once in many milliseconds.
        self._seconds_for_one = max(seconds, 0.001)


_allowance = _Allowance()
