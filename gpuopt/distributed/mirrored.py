"""Values and variables with one copy for each replica, and the replica that this thread is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpuopt.distributed.communicator import Communicator
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.row_changes import register
from gpuopt.variables.undo import Undo, all_or_nothing
from gpuopt.variables.variable import Variable


class PerReplica:
    """One value for each replica of this process; `MirroredStrategy.run` passes each its value.

    Attributes:
        values: In the order of the replicas.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)


class MirroredVariable:
    """One variable with a copy on each replica's device.

    A replica's loss and optimizer take `local`, its own copy.

    Attributes:
        replicas: The copies of this process, in the order of its replicas.
    """

    def __init__(self, replicas: Sequence[Variable]) -> None:
        self.replicas = tuple(replicas)
        identities = [copy.identity for copy in self.replicas]
        for own in identities:
            own.copies = [weakref.ref(other) for other in identities if other is not own]

    @property
    def name(self) -> str:
        """The first copy's name; the others are called `<name>/replica_<i>`, as in TensorFlow."""
        return self.replicas[0].name

    @property
    def local(self) -> Variable:
        """The copy of the replica that runs on this thread; the first one outside of replicas."""
        communicator = _this_thread.communicator
        return self.replicas[0 if communicator is None else communicator.local.rank]

    def assign(self, value: Any) -> MirroredVariable:
        """Overwrites all copies, or none; see `Variable.assign`."""

        def assign(undo: Undo) -> None:
            for copy in self.replicas:
                undo.assign(copy, value)

        with writing():  # so that a checkpoint holds equal copies
            all_or_nothing(assign)
        return self

    def numpy(self) -> Any:
        """Returns a copy of the first replica's value in host memory."""
        return self.replicas[0].numpy()


class MirroredVariables:
    """The mirrored variables that a strategy has made, while they live."""

    def __init__(self) -> None:
        self._of_copies: weakref.WeakKeyDictionary[Identity, weakref.ref[MirroredVariable]] = (
            weakref.WeakKeyDictionary()
        )
        register(self)

    def add(self, mirrored: MirroredVariable) -> None:
        for copy in mirrored.replicas:
            self._of_copies[copy.identity] = weakref.ref(mirrored)

    def place_of(self, variable: Variable) -> int:
        """Returns the place in this process of the replica whose copy a variable is.

        Raises:
            ValueError: it is no copy of any mirrored variable.
        """
        reference = self._of_copies.get(variable.identity)
        mirrored = None if reference is None else reference()
        if mirrored is None:
            raise ValueError(
                f'"{variable.name}" is no copy of a variable made by MirroredStrategy.variable'
            )
        identities = [copy.identity for copy in mirrored.replicas]
        return identities.index(variable.identity)

    def find(self, variable: Variable, place: int) -> MirroredVariable:
        """Returns whose copy a variable is.

        Args:
            variable: The copy of the replica that asks.
            place: The replica's place in this process.

        Raises:
            ValueError: it is not that replica's copy of any.
        """
        reference = self._of_copies.get(variable.identity)
        mirrored = None if reference is None else reference()
        if mirrored is None or mirrored.replicas[place].identity is not variable.identity:
            raise ValueError(
                f'"{variable.name}" is not this replica\'s copy of a variable made by '
                "MirroredStrategy.variable"
            )
        return mirrored

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            reference = self._of_copies.get(variable.identity)
            mirrored = None if reference is None else reference()
            if mirrored is not None and not set(mirrored.replicas).issubset(variables):
                raise ValueError(
                    f'"{variable.name}" is one copy of a MirroredVariable, and the others would '
                    f'keep their rows: pass the MirroredVariable "{mirrored.name}" to gpuopt.rows'
                )


class _ThisThread(threading.local):
    strategy: Any = None
    communicator: Communicator | None = None


_this_thread = _ThisThread()


@contextmanager
def run_as_replica(strategy: Any, communicator: Communicator) -> Iterator[None]:
    """Makes this thread the replica of `strategy` that is this rank."""
    outer = _this_thread.strategy, _this_thread.communicator
    _this_thread.strategy, _this_thread.communicator = strategy, communicator
    try:
        yield
    finally:
        _this_thread.strategy, _this_thread.communicator = outer


def find_communicator(strategy: Any) -> Communicator | None:
    """Returns this thread's communicator in `strategy`; None if the thread is no replica of it."""
    return _this_thread.communicator if _this_thread.strategy is strategy else None
