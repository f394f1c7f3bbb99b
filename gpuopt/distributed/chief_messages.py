"""The messages between the chief and the workers of a training in several processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from gpuopt.device import Device
from gpuopt.distributed.agreement import refuse_differences
from gpuopt.distributed.communicator import Communicator, Refusal, say_error
from gpuopt.distributed.coordinator import WorkerFigures
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.reduction import bring_to
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError, WorkerFailedError
from gpuopt.step.pairs import Gradient
from gpuopt.variables.gate import writing
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable, trainable_variables

# The rank with the variables; the worker `index` is rank `index + 1`.
CHIEF = 0

# Who waits for messages looks for signals and deadlines as often as this.
LOOK_S = 0.05

# Errors that another process can raise as they are: they are made of their text.
_SENT_AS_THEY_ARE = (
    CancelledError,
    DeadlineExceededError,
    IndexError,
    TypeError,
    ValueError,
    WorkerFailedError,
)


class Push(NamedTuple):
    """From a worker: gradients for `local_step`, each with its variable's place."""

    number: int
    local_step: int
    gradients: list[tuple[Gradient | None, int]]


class Leave(NamedTuple):
    """From a worker: it has ended.

    Attributes:
        error: The repr of the error that it ended by; None if it has finished, or all is over.
        is_told: Whether the error only reports another process.
    """

    error: str | None = None
    is_told: bool = False


class Ask(NamedTuple):
    """From a worker that has ended: whether the chief is still there."""

    number: int


class Stop(NamedTuple):
    """From a worker: a signal asks it to end."""


class Reply(NamedTuple):
    """From the chief: the outcome of push `number`, or the first token if it is 0.

    Attributes:
        token: See `Ticket`; None if there is a refusal.
        refusal: What the worker is to raise.
        state: See `SharedVariables.pack`; empty if there is nothing new.
    """

    number: int
    token: int | None
    refusal: Refusal | None
    state: bytes


class End(NamedTuple):
    """From the chief, last: how the training has ended.

    Attributes:
        figures: Of each worker.
        failure: The failure that the workers could not do without, if any.
        was_stopped: See `Coordinator`.
        state: See `SharedVariables.pack`.
    """

    figures: list[WorkerFigures]
    failure: str | None
    was_stopped: bool
    state: bytes


class RemoteError(GpuoptError):
    """An error of another process, of which there is the repr."""

    def __repr__(self) -> str:
        return str(self)


def refusal_of(error: Exception) -> Refusal:
    """Returns what another process is to raise in place of an error of this one."""
    if type(error) in _SENT_AS_THEY_ARE:
        return Refusal(type(error), say_error(error, str))
    return Refusal(WorkerFailedError, f"the chief, rank {CHIEF}, has failed: {say_error(error)}")


class SharedVariables:
    """The trainable variables, the global step, and more, of which each process has a copy.

    A variable's place is the same number in all processes.
    """

    def __init__(
        self,
        communicator: Communicator,
        global_step: Variable,
        settings: Mapping[str, object],
        more_variables: Mapping[str, Variable],
        what: str,
    ) -> None:
        """Compares what all ranks bring, for the purpose `what`; all of them do this.

        Settings must be the same on all ranks, and so must the names of `more_variables`, whose own
        names need not be.

        Raises:
            ValueError: the ranks have other variables or settings.
        """
        self._global_step = global_step
        trainable = sorted(trainable_variables(), key=lambda variable: variable.name)
        self._variables = [*trainable, *more_variables.values()]
        self._places: dict[Identity, int] = {
            variable.identity: place for place, variable in enumerate(self._variables)
        }
        mine = {name: _say_setting(value) for name, value in settings.items()}
        mine["the type of global_step"] = str(global_step.dtype)
        named = {f'trainable variable "{variable.name}"': variable for variable in trainable}
        for name, variable in {**named, **more_variables}.items():
            mine[name] = f"{variable.dtype}{list(variable.shape)}"
        of_ranks = communicator.all_gather(mine, what)
        refuse_differences(of_ranks)

    @property
    def variables(self) -> list[Variable]:
        """All but the global step, by their places."""
        return list(self._variables)

    def pack_gradients(self, pairs: Pairs) -> list[tuple[Gradient | None, int]]:
        """Returns gradients in host memory, each with its variable's place.

        Raises:
            ValueError: a variable is none of these.
        """
        return [
            (
                None if gradient is None else bring_to(gradient, Device.cpu),
                self._find_place(variable),
            )
            for gradient, variable in pairs
        ]

    def unpack_gradients(self, gradients: Iterable[tuple[Gradient | None, int]]) -> Pairs:
        """Returns the pairs that `pack_gradients` was given in another process."""
        return [(gradient, self._variables[place]) for gradient, place in gradients]

    def pack(self, variables: Iterable[Variable]) -> bytes:
        """Copies the values of the global step and of some of the variables."""
        values = [(self._find_place(variable), variable.numpy()) for variable in variables]
        return pickle.dumps((self._global_step.numpy(), values), pickle.HIGHEST_PROTOCOL)

    def unpack(self, state: bytes) -> None:
        """Assigns the values that were packed in another process."""
        step, values = pickle.loads(state)
        with writing():  # so that a checkpoint holds the variables of one step
            for place, value in values:
                self._variables[place].assign(value)
            self._global_step.assign(step)

    def _find_place(self, variable: Variable) -> int:
        place = self._places.get(variable.identity)
        if place is None:
            raise ValueError(
                f'"{variable.name}" was not there, as a trainable variable of a name of its own, '
                "when the run began: make variables before, on all ranks"
            )
        return place


def _say_setting(value: object) -> str:
    """Returns the same text for equal numbers, as 60 and 60.0."""
    if not isinstance(value, int | float | np.number):
        return repr(value)
    number = float(value)
    return str(int(number)) if number.is_integer() else str(number)
