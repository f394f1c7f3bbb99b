"""Training on several workers, towers or devices, of one process or of many."""

from gpuopt.distributed.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gpuopt.distributed.communicator import Communicator, MessagingCommunicator, RankGroup
from gpuopt.distributed.communicators import (
    MPICommunicator,
    MPIGroup,
    NCCLCommunicator,
    NCCLGroup,
    SingleCommunicator,
    SingleGroup,
    ThreadCommunicator,
    ThreadGroup,
    TorchCommunicator,
    TorchGroup,
)
from gpuopt.distributed.coordinator import Coordinator, WorkerFigures
from gpuopt.distributed.mirrored import MirroredVariable, PerReplica
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.strategy import MirroredStrategy
from gpuopt.distributed.sync_coordinator import SyncCoordinator
from gpuopt.distributed.sync_replicas import SyncReplicasOptimizer, SyncReplicasWorker
from gpuopt.distributed.tower import Reduction, TowerOptimizer, replicate

__all__ = [
    "Communicator",
    "ConditionalAccumulator",
    "Coordinator",
    "MPICommunicator",
    "MPIGroup",
    "MessagingCommunicator",
    "MirroredStrategy",
    "MirroredVariable",
    "NCCLCommunicator",
    "NCCLGroup",
    "PerReplica",
    "RankGroup",
    "Reduction",
    "SingleCommunicator",
    "SingleGroup",
    "SparseConditionalAccumulator",
    "StopRequest",
    "SyncCoordinator",
    "SyncReplicasOptimizer",
    "SyncReplicasWorker",
    "ThreadCommunicator",
    "ThreadGroup",
    "TorchCommunicator",
    "TorchGroup",
    "TowerOptimizer",
    "WorkerFigures",
    "replicate",
]
