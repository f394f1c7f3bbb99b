"""Registry: a set of objects that does not keep them alive."""

from __future__ import annotations

from typing import Generic, TypeVar
from weakref import WeakSet

from gpuopt.locks import Lock

Registered = TypeVar("Registered")


class Registry(Generic[Registered]):
    """Objects that any thread may add, and that go when they die."""

    def __init__(self, what: str) -> None:
        """Starts empty.

        Args:
            what: For the error of a thread that waits for another one too long.
        """
        self._objects: WeakSet[Registered] = WeakSet()
        # Threads add objects while others ask. Reentrant, for garbage collections.
        self._guard = Lock(what)

    def add(self, new: Registered) -> None:
        with self._guard:
            self._objects.add(new)

    def listed(self) -> list[Registered]:
        """Lists what is alive."""
        with self._guard:
            return list(self._objects)
