"""Launches that are always started together, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpuopt.backends.cuda.launcher import Launch


class LaunchSequence:
    """Prepared launches, and the arguments that differ from one start to the next."""

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        # Those that take an argument of `start`, by its name.
        self._takers: dict[str, list[Launch]] = {}
        # (a launch that reads the gradient's rows, the name of its parameter)
        self._readers: list[tuple[Launch, str]] = []
        self._last: dict[str, Any] = {}

    def add(self, launch: Launch, takes: Iterable[str] = (), rows: str | None = None) -> None:
        """Adds a launch after the others.

        Args:
            launch: The launch, which has the arguments of its first start.
            takes: The names of parameters that `start` may be given.
            rows: The name of the parameter that takes the gradient's rows, if there is one.
        """
        self._launches.append(launch)
        for name in takes:
            self._takers.setdefault(name, []).append(launch)
        if rows is not None:
            self._readers.append((launch, rows))

    def start(self, rows: Any = None, **arguments: Any) -> None:
        """Starts all launches on the current stream.

        Args:
            rows: The gradient's rows, which are not kept.
            **arguments: New values; those that are not named stay as they were.
        """
        for name, given in arguments.items():
            before = self._last.get(name, self)
            if before is not given and not (isinstance(given, tuple) and before == given):
                for launch in self._takers.get(name, ()):
                    launch.replace(**{name: given})
                self._last[name] = given
        for launch, parameter in self._readers:
            launch.replace(**{parameter: rows})
        try:
            for launch in self._launches:
                launch.start()
        finally:
            for launch, parameter in self._readers:
                launch.forget(parameter)
