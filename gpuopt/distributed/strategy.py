"""MirroredStrategy: a copy of every variable on each device, kept equal by summed gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.distributed.agreement import Agreement
from gpuopt.distributed.communicator import Communicator, RankGroup
from gpuopt.distributed.communicators import default_group
from gpuopt.distributed.first_rank import call_in_first_rank, call_in_rank_0, take_value_of_rank_0
from gpuopt.distributed.mirrored import (
    MirroredVariable,
    MirroredVariables,
    PerReplica,
    find_communicator,
    run_as_replica,
)
from gpuopt.distributed.reduction import Mark, bring_to, sum_over_ranks
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S
from gpuopt.optimizer import Optimizer
from gpuopt.step.pairs import Gradient, as_pairs, as_sequence
from gpuopt.step.replica_context import ReplicaContext, in_replica
from gpuopt.step.request import Copies, StepRequest, pass_on
from gpuopt.step.updates import pairs_to_sum
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import Variable


class MirroredStrategy:
    """Trains the same model on several devices, each on its own data.

    In `run`, every replica computes gradients of its own copies. Any optimizer's
    `apply_gradients` then waits for all replicas, sums their gradients, and updates all copies at
    once: the optimizer's hyperparameters are evaluated once, each copy has slots on its own device,
    and `global_step` grows by 1.

        strategy = MirroredStrategy(["gpu:0", "gpu:1"])
        w = strategy.variable(np.zeros(10, np.float32), name="w")
        strategy.run(lambda x: optimizer.minimize(lambda: loss(w.local, x), step, [w.local]), ...)

    Name one device several times for several replicas on it.

    Each replica is a rank of a group, and reduces through the rank's `Communicator`. In each
    process one replica, the first, updates the copies of all replicas of the process. If the group
    has ranks in other processes, as an `MPIGroup` has, all processes make the same strategy, the
    same variables and the same calls, and have an optimizer each.
    """

    def __init__(
        self,
        devices: Sequence[Device | str],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        group: RankGroup | None = None,
        check: bool = False,
    ) -> None:
        """Makes a strategy of one replica for each device.

        Args:
            devices: The device of each replica of this process.
            timeout_s: How long a replica waits for the others in `apply_gradients`, in seconds.
                Ignored if `group` is given: it has its own time limit.
            group: The ranks that the replicas are; by default one thread of this process each.
            check: Whether all processes compare the values of copies and of the optimizer's state
                before every step, for which the host reads them all. Otherwise they do so before
                an optimizer's first step alone, and leave out what is on GPUs.

        Raises:
            TypeError: `devices` is no list.
            ValueError: there are no devices, or not as many as ranks of the group in this process.
            DeviceUnavailableError: a device cannot be used.
        """
        if isinstance(devices, str) or not isinstance(devices, Iterable):
            raise TypeError(f'devices must be a list, as ["cpu", "cpu"], got {devices!r}')
        self.devices = [Device.parse(device) for device in devices]
        if not self.devices:
            raise ValueError("MirroredStrategy needs at least one device")
        for device in self.devices:
            backend_for(device)
        self._group = default_group(len(self.devices), timeout_s) if group is None else group
        if self._group.local_size != len(self.devices):
            raise ValueError(
                f"the group has {self._group.local_size} ranks in this process; MirroredStrategy "
                f"needs one for each of {len(self.devices)} devices"
            )
        self._agreement = Agreement(check)
        self._mirrored = MirroredVariables()

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles: the replicas of a strategy are threads of this process.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: its replicas are threads of this "
            "process. Make another strategy of the same devices, and its variables by "
            "`strategy.variable(value)`"
        )

    @property
    def num_replicas_in_sync(self) -> int:
        return self._group.size

    @property
    def communicator(self) -> Communicator:
        """The communicator of the replica that runs on this thread.

        Raises:
            RuntimeError: this thread is no replica of the strategy.
        """
        communicator = find_communicator(self)
        if communicator is None:
            raise RuntimeError("there are communicators only in MirroredStrategy.run")
        return communicator

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the cross-replica context, where `Optimizer.apply_gradients` is an error."""
        context = ReplicaContext(
            num_replicas=self.num_replicas_in_sync, strategy=self, is_cross_replica=True
        )
        with in_replica(context):
            yield

    def variable(self, value: Any, name: str = "Variable", **options: Any) -> MirroredVariable:
        """Makes a variable with a copy on each device; arguments are `Variable`'s.

        The value of rank 0 counts, in all processes.

        Raises:
            ValueError: another process makes a variable of another name, shape or dtype.
        """
        first = Variable(value, name=name, device=self.devices[0], **options)
        others = [
            Variable(first.storage, name=f"{first.name}/replica_{i}", device=device, **options)
            for i, device in enumerate(self.devices)
            if i > 0
        ]
        mirrored = MirroredVariable([first, *others])
        if self._group.size > self._group.local_size:
            self._group.run(
                lambda communicator: take_value_of_rank_0(
                    communicator, mirrored.replicas[communicator.local.rank], mirrored.name
                )
            )
        self._mirrored.add(mirrored)
        return mirrored

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> PerReplica:
        """Calls `fn` once in each replica of this process, each in its own thread and context.

        Args:
            fn: The function of a replica; in it, `replica_context()` tells which replica it is.
            args: A tuple or list of arguments for `fn`. Each replica gets its own value of a
                PerReplica, and other arguments as they are.
            kwargs: Keyword arguments for `fn`, in the same way.

        Returns:
            What each replica returned.

        Raises:
            TypeError: `args` is no tuple or list.
            Exception: what the first replica to fail raised; the others do not wait any longer.
        """
        if not isinstance(args, tuple | list):
            raise TypeError(
                "args must be a tuple or a list of the function's arguments, as (inputs,), got "
                f"{describe(args)}"
            )

        def run_replica(communicator: Communicator) -> Any:
            place = communicator.local.rank

            def choose(value: Any) -> Any:
                return value.values[place] if isinstance(value, PerReplica) else value

            context = ReplicaContext(communicator.rank, communicator.size, strategy=self)
            with (
                run_as_replica(self, communicator),
                in_replica(context),
                backend_for(self.devices[place]).enter(),
            ):
                return fn(
                    *(choose(value) for value in args),
                    **{name: choose(value) for name, value in kwargs.items()},
                )

        try:
            return PerReplica(self._group.run(run_replica))
        except BaseException:
            self._agreement.forget_steps()
            raise

    def call_once(self, function: Callable[[], Any]) -> Any:
        """Calls `function` in rank 0 alone, and returns its result to every rank.

        So that one process writes a checkpoint, or says which one all are to restore. All processes
        make this call outside of `run`, or all replicas in it. The others wait for rank 0 no longer
        than the group's time limit.

        Args:
            function: Its result is sent to other processes by pickle.

        Raises:
            Exception: what `function` raised, in rank 0.
            WorkerFailedError: `function` has raised, in the other ranks.
        """
        communicator = find_communicator(self)
        if communicator is not None:
            return call_in_rank_0(communicator, function, "call_once")
        if self._group.size == self._group.local_size:
            return function()
        return self._group.run(lambda each: call_in_rank_0(each, function, "call_once"))[0]

    def weight_of(self, num_examples: int) -> float:
        """Returns what a replica's mean loss is multiplied by if batches differ in size.

        The replicas' gradients are averaged. With these weights, each example counts alike, whoever
        has it. All replicas make this call.

        Args:
            num_examples: How many examples this replica has; one without any must differentiate a
                loss of 0 by the same variables.

        Raises:
            ValueError: a number is negative, or all are 0.
        """
        communicator = self.communicator
        numbers = communicator.all_gather(num_examples, "weight_of")
        if min(numbers) < 0 or not any(numbers):
            raise ValueError(f"weight_of needs numbers of examples, got {numbers} in rank order")
        return float(num_examples * communicator.size / sum(numbers))

    def apply_gradients(self, optimizer: Optimizer, request: StepRequest) -> None:
        """Does one replica's part of `optimizer.apply_gradients`; see `ReplicaContext.strategy`.

        Raises:
            ValueError: processes bring other optimizers, gradients, hyperparameters that are
                numbers, or values of `global_step` in host memory; or their copies or slots differ,
                where these are compared (see `__init__`). Nothing is updated then.

        Besides what `Optimizer.apply_gradients` and a `Communicator` raise.
        """
        communicator = self.communicator
        place = communicator.local.rank
        global_step = request.global_step
        gradients, variables, described = self.own_gradients(
            optimizer, request.pairs, request.takes_wide
        )
        what = f"apply_gradients of {type(optimizer).__name__} with {described}"
        copies = [(variable.name, variable.replicas[place]) for variable in variables]

        def update(sums_of_replicas: list[list[Gradient]]) -> None:
            every_sum = [PerReplica(row) for row in zip(*sums_of_replicas, strict=True)]
            summed = list(zip(every_sum, variables, strict=True))
            distribution = _AlreadySummed(communicator.size, request)
            with self.scope():
                optimizer._distributed_apply(distribution, summed, global_step, request.name)

        agreement = self._agreement
        try:
            settings = agreement.describe_settings(communicator, optimizer, global_step)
            sums = sum_over_ranks(communicator, gradients, f"{what}{settings}")
            agreement.compare_values(communicator, optimizer, copies, what)
            # An optimizer has one state for all copies of its process, so one replica updates them.
            call_in_first_rank(communicator, update, sums, self.devices, f"the update of {what}")
        except BaseException:
            agreement.forget_steps()
            raise
        agreement.note_step(optimizer)

    def own_gradients(
        self,
        optimizer: Optimizer,
        grads_and_vars: Iterable[tuple[Any, Any]],
        takes_wide: bool = False,
    ) -> tuple[list[Gradient], list[MirroredVariable], str]:
        """Checks the gradients that the replica on this thread brings to a step.

        Args:
            optimizer: Whose step it is.
            grads_and_vars: (gradient, variable) pairs: copies of this replica, or the
                MirroredVariables themselves.
            takes_wide: See `pairs_for`.

        Returns:
            The gradients that are not None, their variables, and a description of both that is the
            same in all replicas whose gradients fit together.

        Raises:
            ValueError, TypeError, IndexError: what `Optimizer.apply_gradients` raises for a pair;
                or a variable is not this replica's copy.
        """
        place = self.communicator.local.rank
        pairs = [
            (gradient, v.replicas[place] if isinstance(v, MirroredVariable) else v)
            for gradient, v in as_pairs(as_sequence(grads_and_vars))
        ]
        gradients, variables = [], []
        for gradient, variable in pairs_to_sum(optimizer, pairs, takes_wide):
            if gradient is not None:
                gradients.append(gradient)
                variables.append(self._mirrored.find(variable, place))
        return gradients, variables, _describe(gradients, variables)

    def place_of(self, copy: Variable) -> int:
        """Returns the place in this process of the replica whose copy a variable is.

        Raises:
            ValueError: it is no copy of any of the strategy's variables.
        """
        return self._mirrored.place_of(copy)

    def batch_reduce_to(
        self, op: str, value_destination_pairs: Iterable[tuple[Any, MirroredVariable]]
    ) -> list[PerReplica]:
        """Sums gradients over the replicas, and brings the sum to each copy's device.

        Args:
            op: "SUM".
            value_destination_pairs: (a PerReplica of gradients, their variable) pairs.

        Returns:
            A PerReplica of sums for each pair, which are only to be read.

        Raises:
            ValueError: another `op`, a wrong number of gradients, or one of a wrong shape.
        """
        if op.upper() != "SUM":
            raise ValueError(f'op must be "SUM", got {op!r}')
        pairs = list(value_destination_pairs)
        for value, variable in pairs:
            self._check_gradients(value, variable)
        variables = [variable for _, variable in pairs]
        written = [Mark(device) for device in self.devices]

        def sum_in_replica(communicator: Communicator) -> tuple[list[Gradient], Mark]:
            place = communicator.local.rank
            device = self.devices[place]
            written[place].follow()
            gradients = [bring_to(value.values[place], device) for value, _ in pairs]
            what = f"batch_reduce_to of {_describe(gradients, variables)}"
            return sum_over_ranks(communicator, gradients, what), Mark(device)

        of_replicas = self._group.run(sum_in_replica)
        for _, mark in of_replicas:
            mark.follow()
        return [PerReplica(row) for row in zip(*(sums for sums, _ in of_replicas), strict=True)]

    def update(
        self,
        optimizer: Optimizer,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Updates all copies by summed gradients; see `Optimizer._distributed_apply`."""
        pairs = [(value, variable) for value, variable in grads_and_vars if value is not None]
        sums = self.batch_reduce_to("SUM", pairs)
        variables = [variable for _, variable in pairs]
        request = StepRequest(None, global_step, name)
        make = partial(pass_on, optimizer)
        _update_copies(make, zip(sums, variables, strict=True), request)

    def _check_gradients(self, value: Any, variable: Any) -> None:
        if not isinstance(variable, MirroredVariable):
            raise TypeError(f"expected a MirroredVariable, got {type(variable).__name__}")
        number = len(self.devices)
        if not isinstance(value, PerReplica) or len(value.values) != number:
            raise ValueError(
                f'gradients for "{variable.name}" must be a PerReplica of {number}, got {value!r}'
            )
        shape = variable.replicas[0].shape
        for gradient in value.values:
            if not isinstance(gradient, IndexedSlices) and np.shape(gradient) != shape:
                raise ValueError(
                    f'gradient for "{variable.name}" has shape {np.shape(gradient)}; the variable '
                    f"has shape {shape}"
                )


class _AlreadySummed:
    """The strategy that `Optimizer._distributed_apply` gets for gradients that are summed already.

    Attributes:
        num_replicas_in_sync: See `MirroredStrategy`, also for the methods.
    """

    def __init__(self, num_replicas: int, request: StepRequest) -> None:
        """Takes the step.

        Args:
            num_replicas: See `num_replicas_in_sync`.
            request: The step; its pairs, global step and name are those that `update` is given.
        """
        self.num_replicas_in_sync = num_replicas
        self._request = request

    def batch_reduce_to(
        self, op: str, value_destination_pairs: Iterable[tuple[PerReplica, MirroredVariable]]
    ) -> list[PerReplica]:
        return [value for value, _ in value_destination_pairs]

    def update(
        self,
        optimizer: Optimizer,
        grads_and_vars: Iterable[tuple[PerReplica | None, MirroredVariable]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        pairs = [(value, variable) for value, variable in grads_and_vars if value is not None]
        request = self._request._replace(global_step=global_step, name=name)
        # Not by its `apply_gradients`, which each replica has called, maybe a user's own.
        _update_copies(optimizer._apply_request, pairs, request)


def _update_copies(
    make: Callable[[StepRequest], None],
    sums: Iterable[tuple[PerReplica, MirroredVariable]],
    request: StepRequest,
) -> None:
    """Updates each copy of this process by the sum of gradients on the copy's device.

    Args:
        make: Makes the step.
        sums: The sums, and whose they are.
        request: The step, but for its pairs.
    """
    sums = list(sums)
    every_copy = [
        (gradient, copy)
        for summed, variable in sums
        for gradient, copy in zip(summed.values, variable.replicas, strict=True)
    ]
    # Outside of all replicas: hyperparameters are evaluated once, and the step grows once.
    num_copies = max((len(variable.replicas) for _, variable in sums), default=1)
    of_variables = {tuple(copy.device for copy in each.replicas) for _, each in sums}
    devices = set(chain.from_iterable(of_variables))
    are_alike = (
        len(of_variables) == 1
        and len(devices) == num_copies
        and all(device.kind == "gpu" for device in devices)
    )
    identities = frozenset(copy.identity for _, copy in every_copy)
    with in_replica(ReplicaContext()):
        copies = Copies(num_copies, are_alike, identities)
        make(request._replace(pairs=every_copy, copies=copies))


def _describe(gradients: Iterable[Gradient], variables: Iterable[MirroredVariable]) -> str:
    pairs = zip(gradients, variables, strict=True)
    return str([f"{variable.name} by {type(gradient).__name__}" for gradient, variable in pairs])
