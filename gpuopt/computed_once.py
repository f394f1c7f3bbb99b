"""An attribute that is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class computed_once(Generic[Value]):
    """Does what functools.cached_property does, which has a lock in Python 3.11.

    A forked child would find that locked by a thread that it does not have. Here two threads at
    once may both compute the value; one of the two equal values stays.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> computed_once[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> computed_once[Value] | Value:
        if instance is None:
            return self
        # Found before this descriptor from now on.
        return instance.__dict__.setdefault(self._name, self._compute(instance))  # type: ignore[no-any-return]
