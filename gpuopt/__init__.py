"""TensorFlow 1's optimizer system for numpy and CuPy arrays."""

from gpuopt.autodiff import embedding_lookup, with_gradients, with_torch
from gpuopt.checkpoint import (
    Saver,
    latest_checkpoint,
    optimizer_from_torch,
    optimizer_to_torch,
)
from gpuopt.device import Device
from gpuopt.distributed import (
    ConditionalAccumulator,
    MirroredStrategy,
    SparseConditionalAccumulator,
    SyncReplicasOptimizer,
    TowerOptimizer,
    replicate,
)
from gpuopt.errors import (
    CancelledError,
    CheckpointError,
    DeadlineExceededError,
    DeviceUnavailableError,
    GpuoptError,
    WorkerFailedError,
)
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import (
    AdadeltaOptimizer,
    AdagradDAOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    LazyAdamOptimizer,
    MomentumOptimizer,
    ProximalAdagradOptimizer,
    ProximalGradientDescentOptimizer,
    RMSPropOptimizer,
)
from gpuopt.training import ExponentialMovingAverage
from gpuopt.update_rule import UpdateRule, update_rule
from gpuopt.variable import Variable, global_variables, trainable_variables

__version__ = "0.1.0"

__all__ = [
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "CancelledError",
    "CheckpointError",
    "ConditionalAccumulator",
    "DeadlineExceededError",
    "Device",
    "DeviceUnavailableError",
    "ExponentialMovingAverage",
    "FtrlOptimizer",
    "GpuoptError",
    "GradientDescentOptimizer",
    "IndexedSlices",
    "LazyAdamOptimizer",
    "MirroredStrategy",
    "MomentumOptimizer",
    "Optimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
    "Saver",
    "SparseConditionalAccumulator",
    "SyncReplicasOptimizer",
    "TowerOptimizer",
    "UpdateRule",
    "Variable",
    "WorkerFailedError",
    "embedding_lookup",
    "global_variables",
    "latest_checkpoint",
    "optimizer_from_torch",
    "optimizer_to_torch",
    "replicate",
    "trainable_variables",
    "update_rule",
    "with_gradients",
    "with_torch",
]
