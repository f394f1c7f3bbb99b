"""NCCLGroup and NCCLCommunicator: ranks with a GPU each, whose arrays go from GPU to GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import finalize

from gpuopt.backends import backend_for
from gpuopt.device import Device, device_of
from gpuopt.distributed.communicator import (
    BUCKET_BYTES,
    Communicator,
    RankGroup,
    ReduceOp,
    check_op,
    check_root,
    fill_buckets,
    join_aligned,
    name_gather,
    reduction_of,
    say_who,
    split_aligned,
)
from gpuopt.distributed.communicators.host import this_host
from gpuopt.distributed.communicators.launcher import refuse_if_alone
from gpuopt.distributed.communicators.nccl_link import Link, LinkBrokenError
from gpuopt.distributed.communicators.threads import ThreadGroup
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, check_timeout
from gpuopt.errors import CancelledError, DeadlineExceededError, WorkerFailedError
from gpuopt.variables.indexed_slices import IndexedSlices

CHECKED_CALLS = 8
"""So many calls with arrays on GPUs are compared among all ranks after they have been connected,
and then the first one of each run."""

_CONNECTING = "the connection of GPUs by NCCL"
_AFTER_A_BREAK = "the call after a collective that was not done"


class NCCLCommunicator(Communicator):
    """A rank with a GPU; see `NCCLGroup.run`.

    What is done with arrays on the rank's GPU is enqueued on the current stream, and the host does
    not wait for it. All ranks get the same bits. But NCCL chooses the order of a sum, so that with
    three ranks and more they may differ from those of other communicators. Where NCCL has no
    reduction, or another one than numpy, all arrays are gathered, and reduced in rank order.
    """

    def __init__(
        self, control: Communicator, link: Link, check: bool = False, is_after_failure: bool = False
    ) -> None:
        self.rank = control.rank
        self.size = control.size
        self._control = control
        self._link = link
        self._check = check
        # Whether the last run has told that the link is broken, or may be.
        self._is_after_failure = is_after_failure
        self._has_met = False
        # The type and message of the error that ended the run for this rank.
        self._end: tuple[type[Exception], str] | None = None

    @property
    def local(self) -> Communicator:
        local = self._control.local
        return self if local is self._control else local

    def end(self) -> None:
        """Makes later calls raise CancelledError."""
        self._end = self._end or (CancelledError, f"the run of rank {self.rank} is over")

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        check_op(op)
        if device_of(array).kind == "cpu":
            return self._control.all_reduce(array, op)
        call = f"all_reduce({op!r}) of {_form(array)}"
        self._begin(call, [array])
        return self._reduce(call, [array], [[0]], op)[0]

    def batch_all_reduce(
        self,
        arrays: Sequence[Any],
        op: ReduceOp = "sum",
        bucket_bytes: int = BUCKET_BYTES,
        what: str | None = None,
    ) -> list[Any]:
        check_op(op)
        buckets = fill_buckets(arrays, bucket_bytes)
        if all(device_of(array).kind == "cpu" for array in arrays):
            return self._control.batch_all_reduce(arrays, op, bucket_bytes, what)
        call = f"batch_all_reduce({op!r}) of [{', '.join(map(_form, arrays))}]"
        if what is not None:
            call = f"{what} by {call}"
        self._begin(f"{call} in buckets of {bucket_bytes} bytes", arrays)
        return self._reduce(call, arrays, buckets, op)

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        return self._control.all_gather(value, what)

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        if slices.device.kind == "cpu":
            return self._control.all_gather_slices(slices, what)
        parts = [slices.values, slices.indices]
        call = f"{name_gather(slices, what)} by {slices.indices.dtype}"
        counts = self._begin(call, parts, brought=len(slices.indices))
        backend = backend_for(self._link.device)
        with backend.enter():
            parts = [_contiguous(backend.xp, part) for part in parts]
            gathered = [
                backend.xp.empty((sum(counts), *part.shape[1:]), part.dtype) for part in parts
            ]
        if sum(counts):
            # Not padded to the longest and gathered: that would need memory and a copy, and in one
            # group broadcasts go side by side.
            self._enqueue(call, lambda: self._broadcast_parts(parts, gathered, counts))
        backend.hold(slices.values, slices.indices)
        return IndexedSlices(gathered[0], gathered[1], slices.dense_shape)

    def broadcast(self, array: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        if device_of(array).kind == "cpu":
            return self._control.broadcast(array, root)
        call = f"broadcast from {root} of {_form(array)}"
        self._begin(call, [array])
        if not array.nbytes:
            return array
        backend = backend_for(self._link.device)
        with backend.enter():
            flat = _contiguous(backend.xp, array)
            self._enqueue(call, lambda: self._link.broadcast(flat, flat, root))
            if flat is not array and self.rank != root:
                array[...] = flat
        backend.hold(array)
        return array

    def barrier(self, what: str = "barrier") -> None:
        self._control.barrier(what)

    def _reduce(
        self, call: str, arrays: Sequence[Any], buckets: Sequence[Sequence[int]], op: ReduceOp
    ) -> list[Any]:
        """Reduces arrays on this rank's GPU: those of a bucket, which lists positions, together."""
        backend = backend_for(self._link.device)
        xp = backend.xp
        reduced: list[Any] = [None] * len(arrays)
        with backend.enter():
            sources = [
                join_aligned([arrays[i] for i in positions])
                if len(positions) > 1
                else _contiguous(xp, arrays[positions[0]])
                for positions in buckets
            ]
            totals = []
            for source, positions in zip(sources, buckets, strict=True):
                if not self._link.can_reduce(source.dtype, op):
                    totals.append(xp.empty((self.size, *source.shape), source.dtype))
                else:  # what was joined is nobody else's
                    totals.append(source if len(positions) > 1 else xp.empty_like(source))
            if sum(source.nbytes for source in sources):
                self._enqueue(call, lambda: self._reduce_or_gather(sources, totals, op))
            for source, total, positions in zip(sources, totals, buckets, strict=True):
                if total.shape != source.shape:
                    total = _fold(xp, total, op)
                if len(positions) == 1:
                    reduced[positions[0]] = total
                    continue
                parts = split_aligned(total, [arrays[i] for i in positions])
                for i, part in zip(positions, parts, strict=True):
                    reduced[i] = part
            backend.hold(*arrays)
        return reduced

    def _reduce_or_gather(
        self, sources: Sequence[Any], totals: Sequence[Any], op: ReduceOp
    ) -> None:
        for source, total in zip(sources, totals, strict=True):
            if source.nbytes and total.shape == source.shape:
                self._link.all_reduce(source, total, op)
            elif source.nbytes:
                self._link.all_gather(source, total)

    def _broadcast_parts(
        self, parts: Sequence[Any], gathered: Sequence[Any], counts: Sequence[int]
    ) -> None:
        begin = 0
        for root, count in enumerate(counts):
            for part, target in zip(parts, gathered, strict=True):
                place = target[begin : begin + count]
                if place.nbytes:
                    self._link.broadcast(part if root == self.rank else place, place, root)
            begin += count

    def _enqueue(self, call: str, collectives: Callable[[], object]) -> None:
        try:
            self._link.enqueue(call, collectives)
        except LinkBrokenError:
            self._raise_why_broken()

    def _begin(self, call: str, arrays: Sequence[Any], brought: int | None = None) -> list[int]:
        """Sees that this rank, and all others if they are asked, can make a call.

        Args:
            call: Describes it; the same on every rank.
            arrays: What it reads or writes.
            brought: What all ranks are to know, if anything: they are asked then.

        Returns:
            What each rank brings, in rank order.
        """
        link = self._link
        if self._end is not None:
            error, message = self._end
            raise error(message)
        is_told = self._is_after_failure and not self._has_met
        if link.why_broken is not None and not is_told:
            self._raise_why_broken()
        for array in arrays:
            if device_of(array) is not link.device:
                raise ValueError(
                    f"{call}: rank {self.rank} has {link.device}, got an array on "
                    f"{device_of(array)}"
                )
        backend_for(link.device).refuse_capture("what a communicator does")
        is_asked = self._check or not self._has_met or link.state.num_calls < CHECKED_CALLS
        if brought is None and not is_asked:
            return []
        told = self._control.all_gather((link.state, brought), f"{call} on GPUs")
        states = {state for state, _ in told}
        if len(states) > 1 or link.state.identity is None:
            # Of the same connection; those of a broken one will never be done, or are already.
            counts = [s.num_calls for s in states if s.identity == link.state.identity]
            self._connect(min(counts))
        self._has_met = True
        return [of_rank for _, of_rank in told]

    def _connect(self, num_common: int) -> None:
        is_told = self._is_after_failure or self._link.is_told
        # After a failure nothing is waited for: the other ranks wait here.
        lost = self._link.drop(0 if is_told else num_common)
        if lost is not None and not is_told:
            self._link.is_told = True
            self._stop(CancelledError, lost)
        identity = self._link.new_identity() if self.rank == 0 else None
        mine = identity, self._link.place(), this_host()
        told = self._control.all_gather(mine, _CONNECTING)
        if len({(place, host) for _, place, host in told}) < self.size:
            places = [f"GPU {place} of {host.name}" for _, place, host in told]
            raise ValueError(f"NCCL needs a GPU for each rank, got {say_who(places)}")
        try:
            self._link.connect(self.size, self.rank, told[0][0])
        except DeadlineExceededError as error:
            self._raise_with_others(str(error))

    def _raise_why_broken(self) -> NoReturn:
        self._link.is_told = True
        self._raise_with_others(str(self._link.why_broken))

    def _raise_with_others(self, why: str) -> NoReturn:
        """Asks the other ranks what they know of what has not been done, and raises."""
        try:
            told = self._control.all_gather(self._link.num_lost, _AFTER_A_BREAK)
        except (ValueError, DeadlineExceededError) as error:
            self._stop(DeadlineExceededError, f"{why}: {error}")
        except (WorkerFailedError, CancelledError) as error:
            self._stop(type(error), f"{error}; {why}")
        calls = say_who([f"{number} collectives" for number in told])
        self._stop(DeadlineExceededError, f"{why}: there were {calls}")

    def _stop(self, error: type[Exception], message: str) -> NoReturn:
        self._end = error, message
        raise error(message)


def _form(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _contiguous(xp: Any, array: Any) -> Any:
    # CuPy's ascontiguousarray gives an array without dimensions one.
    return array if array.flags.c_contiguous else xp.ascontiguousarray(array)


def _fold(xp: Any, parts: Any, op: ReduceOp) -> Any:
    """Reduces arrays, one after the other; overwrites the first."""
    combine = reduction_of(xp, op)
    total = parts[0]
    for part in parts[1:]:
        combine(total, part, out=total)
    return total


class NCCLGroup(RankGroup):
    """The ranks of another group, each with a GPU of its own: their arrays go from GPU to GPU.

    NCCL is NVIDIA's library of collectives between GPUs, here in CuPy's `cupy.cuda.nccl`. Arrays in
    host memory, objects and numbers of rows go over the other group, and so does what NCCL needs to
    find the other GPUs.

    The communicators stay from one run to the next, and are made anew when a run has broken them.

    Attributes:
        size, local_size: See `RankGroup`.
    """

    def __init__(
        self,
        devices: Sequence[Device | str],
        control: RankGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        check: bool = False,
    ) -> None:
        """Describes the group; GPUs are connected when they are first needed.

        Args:
            devices: The GPU of each rank of this process.
            control: The ranks, as an `MPIGroup`; by default a thread of this process for each GPU.
            timeout_s: How long a rank's GPU waits for the others in a collective, and the rank in a
                call, in seconds. `control` has a time limit of its own.
            check: Whether all ranks compare what they call in every call with arrays on GPUs, which
                costs the host a message. Otherwise they do so in the first `CHECKED_CALLS`, and in
                the first one of each run.

        Raises:
            ImportError: CuPy finds no NCCL.
            ValueError: there are not as many devices as ranks in this process, or one is no GPU, or
                there twice.
            DeviceUnavailableError: a GPU cannot be used.
            RuntimeError: there is no `control`, and the environment shows several processes.
        """
        parsed = [Device.parse(device) for device in devices]
        for device in parsed:
            if device.kind != "gpu" or parsed.count(device) > 1:
                raise ValueError(
                    f"NCCLGroup needs a GPU of its own for each rank, got {list(map(str, parsed))}"
                )
        if not parsed:
            raise ValueError("NCCLGroup needs at least one GPU")
        check_timeout(timeout_s)
        if control is None:
            advice = "pass a control group, as MPIGroup() or TorchGroup()"
            refuse_if_alone("NCCLGroup without a control group", 1, advice)
            control = ThreadGroup(len(parsed), timeout_s)
        self._control = control
        self.size = self._control.size
        self.local_size = self._control.local_size
        if len(parsed) != self.local_size:
            raise ValueError(
                f"{len(parsed)} GPUs were given, and this process has {self.local_size} ranks"
            )
        for device in parsed:
            backend_for(device)
        self._check = check
        self._links = [Link(device, timeout_s) for device in parsed]
        # The run that goes on, and those that are about to be refused.
        self._runs: dict[object, None] = {}
        self._has_failed = False
        finalize(self, _close, self._links)

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        run = object()
        try:
            self._runs[run] = None
            if next(iter(self._runs.copy())) is not run:
                raise RuntimeError("a group's `run` was called in a `run` of the same group")
            return self._run(function)
        finally:
            # A built-in: Ctrl-C before the first line of a function would leave the run there.
            self._runs.pop(run, None)

    def _run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        has_failed = self._has_failed

        def run_rank(control: Communicator) -> Any:
            link = self._links[control.local.rank]
            communicator = NCCLCommunicator(
                control, link, self._check, is_after_failure=has_failed or link.is_told
            )
            try:
                return function(communicator)
            except BaseException:
                end_after_failure()
                raise
            finally:
                communicator.end()

        def end_after_failure() -> None:
            self._has_failed = True
            for link in self._links:
                link.end_after_failure()

        try:
            self._has_failed = False
            for link in self._links:
                link.begin_run()
            return self._control.run(run_rank)
        except BaseException:
            end_after_failure()
            raise


def _close(links: Sequence[Link]) -> None:
    for link in links:
        link.close()
