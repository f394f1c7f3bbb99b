"""Implementations of `Communicator`. Code that trains over one imports the protocol alone."""

from gpuopt.distributed.communicator import RankGroup
from gpuopt.distributed.communicators.launcher import warn_if_local
from gpuopt.distributed.communicators.mpi import MPICommunicator, MPIGroup
from gpuopt.distributed.communicators.nccl import NCCLCommunicator, NCCLGroup
from gpuopt.distributed.communicators.single import SingleCommunicator, SingleGroup
from gpuopt.distributed.communicators.threads import ThreadCommunicator, ThreadGroup
from gpuopt.distributed.communicators.torch_group import TorchCommunicator, TorchGroup

__all__ = [
    "MPICommunicator",
    "MPIGroup",
    "NCCLCommunicator",
    "NCCLGroup",
    "SingleCommunicator",
    "SingleGroup",
    "ThreadCommunicator",
    "ThreadGroup",
    "TorchCommunicator",
    "TorchGroup",
    "default_group",
]


def default_group(size: int, timeout_s: float) -> RankGroup:
    """Makes the group that is used where none is given: one thread of this process for each rank.

    Args:
        size: How many ranks there are.
        timeout_s: How long a rank waits for the others, in seconds.

    Warns if a launcher has started several processes: they would not train together.
    """
    warn_if_local("MirroredStrategy")
    return ThreadGroup(size, timeout_s)
