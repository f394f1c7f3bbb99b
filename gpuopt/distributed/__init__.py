"""Training on several workers, towers or devices of one process."""

from gpuopt.distributed.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gpuopt.distributed.communicator import Communicator
from gpuopt.distributed.in_process import SingleCommunicator, ThreadCommunicator

__all__ = [
    "Communicator",
    "ConditionalAccumulator",
    "SingleCommunicator",
    "SparseConditionalAccumulator",
    "ThreadCommunicator",
]
