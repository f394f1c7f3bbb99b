"""The names that `dir` and completion offer for an object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class ListsWhatUsersNeed:
    """An object whose `dir` leaves out the names in `_unlisted` of its class and of its bases.

    Other modules of gpuopt use these, so they have no underscore.
    """

    __slots__ = ()
    _unlisted: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> Iterable[str]:
        unlisted = unlisted_names(type(self))
        return [name for name in super().__dir__() if name not in unlisted]


def unlisted_names(cls: type) -> frozenset[str]:
    """Returns the names that `dir` leaves out of instances of a class."""
    return frozenset().union(*(vars(base).get("_unlisted", ()) for base in cls.__mro__))
