"""MirroredStrategy: a copy of every variable on each device, kept equal by summed gradients."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from gpuopt.backends import backend_for, moved
from gpuopt.device import Device
from gpuopt.distributed.in_process import ThreadCommunicator, run_threads
from gpuopt.distributed.reduction import Mark, sum_gradients
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, checked_timeout
from gpuopt.gradients import Gradient, checked_pairs
from gpuopt.identity import Identity
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.optimizer import Optimizer
from gpuopt.replica_context import ReplicaContext, in_replica, replica_context
from gpuopt.variable import Variable


class PerReplica:
    """One value for each replica; `MirroredStrategy.run` gives each its own.

    Attributes:
        values: In the order of the replicas.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)


class MirroredVariable:
    """One variable with a copy on each replica's device.

    Attributes:
        replicas: The copies, in the order of the replicas.
    """

    def __init__(self, replicas: Sequence[Variable]) -> None:
        self.replicas = tuple(replicas)

    @property
    def name(self) -> str:
        """The first copy's; the others are called `<name>/replica_<i>`, as in TensorFlow."""
        return self.replicas[0].name

    @property
    def local(self) -> Variable:
        """The copy of the replica that runs on this thread; the first one outside of replicas."""
        return self.replicas[replica_context().replica_id]

    def assign(self, value: Any) -> MirroredVariable:
        """Overwrites all copies; see `Variable.assign`."""
        for copy in self.replicas:
            copy.assign(value)
        return self

    def numpy(self) -> Any:
        """Returns a copy of the first replica's value in host memory."""
        return self.replicas[0].numpy()


class _ThisThread(threading.local):
    communicator: ThreadCommunicator | None = None


class MirroredStrategy:
    """Trains the same model on several devices of this process, each on its own data.

    In `run`, every replica computes gradients of its own copies. Any optimizer's
    `apply_gradients` then waits for all replicas, sums their gradients, and updates all copies at
    once: the optimizer's hyperparameters are evaluated once, each copy has slots on its own device,
    and `global_step` grows by 1.

        strategy = MirroredStrategy(["gpu:0", "gpu:1"])
        w = strategy.variable(np.zeros(10, np.float32), name="w")
        strategy.run(lambda x: optimizer.minimize(lambda: loss(w.local, x), step, [w.local]), ...)

    Name one device several times for several replicas on it.
    """

    def __init__(
        self, devices: Sequence[Device | str], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Makes a strategy of one replica for each device.

        Args:
            devices: Where the replicas live.
            timeout_s: How long a replica waits for the others in `apply_gradients`, in seconds.

        Raises:
            ValueError: there are no devices.
            DeviceUnavailableError: one cannot be used.
        """
        self.devices = [Device.parse(device) for device in devices]
        if not self.devices:
            raise ValueError("MirroredStrategy needs at least one device")
        for device in self.devices:
            backend_for(device)
        self._timeout_s = checked_timeout(timeout_s)
        self._mirrored: weakref.WeakKeyDictionary[Identity, weakref.ref[MirroredVariable]] = (
            weakref.WeakKeyDictionary()
        )
        self._this_thread = _ThisThread()

    @property
    def num_replicas_in_sync(self) -> int:
        return len(self.devices)

    @property
    def communicator(self) -> ThreadCommunicator:
        """What the replica on this thread reduces and gathers with.

        Raises:
            RuntimeError: this thread is no replica of the strategy.
        """
        communicator = self._this_thread.communicator
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
        """Makes a variable with a copy on each device; arguments are `Variable`'s."""
        first = Variable(value, name=name, device=self.devices[0], **options)
        others = [
            Variable(first.storage, name=f"{first.name}/replica_{i}", device=device, **options)
            for i, device in enumerate(self.devices)
            if i > 0
        ]
        mirrored = MirroredVariable([first, *others])
        for copy in mirrored.replicas:
            self._mirrored[copy.identity] = weakref.ref(mirrored)
        return mirrored

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> PerReplica:
        """Calls `fn` once in each replica, each in its own thread and context.

        Args:
            fn: What a replica does. `replica_context()` says which one it is.
            args: What it is called with; a PerReplica gives each replica its own value.
            kwargs: Likewise.

        Returns:
            What each replica returned.

        Raises:
            Exception: what the first replica raised; the others are released.
        """
        group = ThreadCommunicator.group(self.num_replicas_in_sync, self._timeout_s)

        def of(rank: int, value: Any) -> Any:
            return value.values[rank] if isinstance(value, PerReplica) else value

        def replica(communicator: ThreadCommunicator) -> Any:
            rank = communicator.rank
            self._this_thread.communicator = communicator
            try:
                context = ReplicaContext(rank, len(group), strategy=self)
                with in_replica(context), backend_for(self.devices[rank]).active():
                    result = fn(
                        *(of(rank, value) for value in args),
                        **{name: of(rank, value) for name, value in kwargs.items()},
                    )
            except BaseException as error:
                communicator.meeting.fail(rank, error)
                raise
            communicator.meeting.leave(rank)
            return result

        return PerReplica(run_threads([partial(replica, rank) for rank in group], self._timeout_s))

    def apply_gradients(
        self,
        optimizer: Optimizer,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any,
        name: Any,
    ) -> None:
        """Does one replica's part of `optimizer.apply_gradients`; see `ReplicaContext.strategy`."""
        rank = self.communicator.rank
        local = [
            (gradient, v.replicas[rank] if isinstance(v, MirroredVariable) else v)
            for gradient, v in grads_and_vars
        ]
        pairs = [
            (gradient, self._mirror_of(variable, rank))
            for gradient, variable in checked_pairs(local, optimizer._dtypes())
            if gradient is not None
        ]

        def merge(of_replicas: list[tuple[list[Any], Mark]]) -> None:
            for _, mark in of_replicas:
                mark.follow()
            merged = [
                (PerReplica(gradient for gradient, _ in row), row[0][1])
                for row in zip(*(pairs for pairs, _ in of_replicas), strict=True)
            ]
            with self.scope():
                optimizer._distributed_apply(self, merged, global_step, name)

        what = f"apply_gradients of {[_described(*pair) for pair in pairs]}"
        brought = pairs, Mark(self.devices[rank])
        self.communicator.meeting.meet(rank, what, brought, merge)

    def batch_reduce_to(
        self, op: str, value_destination_pairs: Iterable[tuple[Any, MirroredVariable]]
    ) -> list[PerReplica]:
        """Sums gradients over the replicas, and brings the sum to each copy's device.

        Args:
            op: "SUM".
            value_destination_pairs: (a PerReplica of gradients, their variable) pairs.

        Returns:
            A PerReplica of sums for each pair. Replicas of one device share an array, which is only
            to be read.

        Raises:
            ValueError: another `op`, or a wrong number of gradients.
        """
        if op.upper() != "SUM":
            raise ValueError(f'op must be "SUM", got {op!r}')
        return [self._reduced(value, variable) for value, variable in value_destination_pairs]

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
        every_copy = [
            (gradient, copy)
            for summed, (_, variable) in zip(sums, pairs, strict=True)
            for gradient, copy in zip(summed.values, variable.replicas, strict=True)
        ]
        # Outside of all replicas: hyperparameters are evaluated once, and the step grows once.
        with in_replica(ReplicaContext()):
            optimizer.apply_gradients(every_copy, global_step, name)

    def _reduced(self, value: Any, variable: Any) -> PerReplica:
        if not isinstance(variable, MirroredVariable):
            raise TypeError(f"expected a MirroredVariable, got {type(variable).__name__}")
        number = self.num_replicas_in_sync
        if not isinstance(value, PerReplica) or len(value.values) != number:
            raise ValueError(
                f'gradients for "{variable.name}" must be a PerReplica of {number}, got {value!r}'
            )
        total = sum_gradients(value.values, self.devices[0])
        return PerReplica(_moved(total, device) for device in self.devices)

    def _mirror_of(self, variable: Variable, rank: int) -> MirroredVariable:
        reference = self._mirrored.get(variable.identity)
        mirrored = None if reference is None else reference()
        if mirrored is None or mirrored.replicas[rank].identity is not variable.identity:
            raise ValueError(
                f'"{variable.name}" is not this replica\'s copy of a variable made by '
                "MirroredStrategy.variable"
            )
        return mirrored


def _moved(gradient: Gradient, device: Device) -> Gradient:
    if not isinstance(gradient, IndexedSlices):
        return moved(gradient, device)
    values, indices = moved(gradient.values, device), moved(gradient.indices, device)
    return IndexedSlices(values, indices, gradient.dense_shape)


def _described(gradient: Gradient, variable: MirroredVariable) -> str:
    return f"{variable.name} by {type(gradient).__name__}"
