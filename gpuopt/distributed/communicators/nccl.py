"""NCCLGroup: ranks with a GPU each, whose arrays go from GPU to GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.distributed.communicator import Communicator, RankGroup
from gpuopt.distributed.communicators.launcher import refuse_if_alone
from gpuopt.distributed.communicators.nccl_communicator import NCCLCommunicator
from gpuopt.distributed.communicators.nccl_link import Link
from gpuopt.distributed.communicators.threads import ThreadGroup
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, check_timeout


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
