"""Training on several workers, towers or devices of one process."""

from gpuopt.distributed.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gpuopt.distributed.communicator import Communicator
from gpuopt.distributed.coordinator import Coordinator, WorkerFigures
from gpuopt.distributed.in_process import SingleCommunicator, ThreadCommunicator
from gpuopt.distributed.strategy import MirroredStrategy, MirroredVariable, PerReplica
from gpuopt.distributed.sync_replicas import SyncReplicasOptimizer, SyncReplicasWorker
from gpuopt.distributed.tower import Reduction, TowerOptimizer, replicate

__all__ = [
    "Communicator",
    "ConditionalAccumulator",
    "Coordinator",
    "MirroredStrategy",
    "MirroredVariable",
    "PerReplica",
    "Reduction",
    "SingleCommunicator",
    "SparseConditionalAccumulator",
    "SyncReplicasOptimizer",
    "SyncReplicasWorker",
    "ThreadCommunicator",
    "TowerOptimizer",
    "WorkerFigures",
    "replicate",
]
