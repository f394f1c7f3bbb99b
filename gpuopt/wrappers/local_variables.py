"""The variables of one of several workers, and the copies of the center."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.distributed.communicator import Communicator
from gpuopt.distributed.communicators import SingleCommunicator
from gpuopt.distributed.first_rank import take_value_of_rank_0
from gpuopt.variables.identity import Identity
from gpuopt.variables.operators import reading
from gpuopt.variables.row_changes import register
from gpuopt.variables.variable import Variable, as_variable


class LocalVariable(NamedTuple):
    """A worker's variable, and what belongs to it.

    Attributes:
        number: The same for all workers' variables with the same center, in order of creation.
        name: What all workers call it.
        variable: The worker's own.
        center: This rank's copy of what the workers have in common.
        companion: Another variable of the worker's own, if its optimizer needs one.
    """

    number: int
    name: str
    variable: Variable
    center: Variable
    companion: Variable | None


class LocalVariables:
    """Base of contrib's custom getters: makes a worker's variables, each with its global center.

    Each worker is a rank, which makes a getter, variables and an optimizer of its own. Centers are
    copied to every rank, and the copies stay equal to the last bit.

    Attributes:
        communicator: This rank's end of the group of workers.
    """

    # The companion of a variable is called `<kind>/<name>`; None if there are none.
    _companion_kind: ClassVar[str | None] = None

    def __init__(
        self,
        worker_device: Device | str | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        """Says where the worker's variables are.

        Args:
            worker_device: The device of all variables; by default where their values live.
            communicator: This worker's end of the group of all workers; by default it is alone.

        Raises:
            ValueError: `worker_device` names no device.
            DeviceUnavailableError: nothing here can run on it.
        """
        self._device = None if worker_device is None else Device.parse(worker_device)
        if self._device is not None:
            backend_for(self._device)
        self.communicator = SingleCommunicator() if communicator is None else communicator
        self._made: dict[Identity, LocalVariable] = {}
        register(self)

    def variable(
        self, value: Any, name: str = "Variable", trainable: bool = True, **options: Any
    ) -> Variable:
        """Makes this worker's variable, and its center. All workers make this call.

        The value of rank 0 counts. If several workers run in this process, the names of all
        variables of the second one end in "/replica_1", and so on.

        Args:
            value: See `Variable`.
            name: The worker's variable's; its center is called "global_center_variable/<name>".
            trainable: A variable that is not trainable has no center, and each worker has its own
                value of it.
            **options: Other arguments of `Variable`.

        Raises:
            ValueError: another worker makes a variable of another name, shape or dtype; or see
                `Variable`.
            TypeError: see `Variable`.
        """
        options.setdefault("device", self._device)
        made = Variable(value, self.name_here(name), trainable, **options)
        if not trainable:
            return made
        if self.communicator.size > 1:
            take_value_of_rank_0(self.communicator, made, name)
        companion = None
        if self._companion_kind is not None:
            companion = self._made_like(made, f"{self._companion_kind}/{name}")
            companion.assign(self.initial_companion(companion.storage))
        center = self._made_like(made, f"global_center_variable/{name}")
        self._made[made.identity] = LocalVariable(len(self._made), name, made, center, companion)
        return made

    def center(self, variable: Any) -> Variable:
        """Returns what the workers have in common: this rank's copy of a variable's center.

        Raises:
            ValueError: `variable` was not made by `variable` of this object.
        """
        return self.find(as_variable(variable)).center

    def find(self, variable: Variable) -> LocalVariable:
        """Returns what belongs to a variable.

        Raises:
            ValueError: it was not made by `variable` of this object.
        """
        found = self._made.get(variable.identity)
        if found is None:
            raise ValueError(
                f'"{variable.name}" has no global center: make it by {type(self).__name__}.variable'
            )
        return found

    def made(self) -> list[LocalVariable]:
        """Lists the worker's trainable variables, in order of creation."""
        return list(self._made.values())

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        for made in self.made():
            for each in (made.variable, made.center, made.companion):
                if each is not None and each in variables:
                    raise ValueError(
                        f'the rows of "{each.name}" stay as they are: workers exchange '
                        f'"{made.name}" with a global center, and those of all ranks have one shape'
                    )

    def initial_companion(self, center: Any) -> Any:
        """Returns the first value of the companion of a worker's variable.

        Args:
            center: The value of the center, and of the worker's variable.
        """
        return center

    def name_here(self, name: str) -> str:
        """Returns a name for what each worker has, which tells those of one process apart."""
        place = self.communicator.local.rank
        return f"{name}/replica_{place}" if place else name

    def _made_like(self, variable: Variable, name: str) -> Variable:
        with reading(variable):
            return Variable(
                variable.storage,
                self.name_here(name),
                trainable=False,
                constraint=variable.constraint,
                device=variable.device,
            )


def copies_of(variables: Iterable[Variable]) -> list[Any]:
    """Returns copies of variables' values, each on its device."""
    copies = []
    for variable in variables:
        with reading(variable), backend_for(variable.device).enter():
            copies.append(variable.storage.copy())
    return copies
