"""TensorFlow 1's optimizer system for numpy and CuPy arrays."""

from typing import TYPE_CHECKING, Any

from gpuopt import optimizers, schedules
from gpuopt.autodiff import embedding_lookup, with_gradients, with_torch
from gpuopt.checkpoint import Saver, latest_checkpoint
from gpuopt.clipping import (
    clip_by_average_norm,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    global_norm,
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
from gpuopt.interop import (
    optimizer_from_bitsandbytes,
    optimizer_from_torch,
    optimizer_to_bitsandbytes,
    optimizer_to_torch,
)
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import *  # noqa: F403
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.optimizers.base.sign_decay import (
    get_cosine_decay_fn,
    get_linear_decay_fn,
    get_restart_decay_fn,
)
from gpuopt.optimizers.base.weight_decay import extend_with_decoupled_weight_decay
from gpuopt.rules.sources import CudaSource
from gpuopt.rules.update_rule import UpdateRule, update_rule
from gpuopt.schedules import *  # noqa: F403
from gpuopt.step.loss import value_and_gradients
from gpuopt.tables import Rows, rows
from gpuopt.training import ExponentialMovingAverage
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable, global_variables, trainable_variables
from gpuopt.version import __version__ as __version__
from gpuopt.wrappers import (
    AGNCustomGetter,
    AGNOptimizer,
    DropStaleGradientOptimizer,
    DynamicLossScale,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    GradientAccumulationOptimizer,
    LossScaleManager,
    LossScaleOptimizer,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
    MovingAverageOptimizer,
    MultitaskOptimizerWrapper,
    VariableClippingOptimizer,
    clip_gradients_by_global_norm,
)

__all__ = [
    "AGNCustomGetter",
    "AGNOptimizer",
    "CancelledError",
    "CheckpointError",
    "ConditionalAccumulator",
    "CudaSource",
    "DeadlineExceededError",
    "Device",
    "DeviceUnavailableError",
    "DropStaleGradientOptimizer",
    "DynamicLossScale",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "ExponentialMovingAverage",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "GpuoptError",
    "GradientAccumulationOptimizer",
    "IndexedSlices",
    "LossScaleManager",
    "LossScaleOptimizer",
    "MirroredStrategy",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MovingAverageOptimizer",
    "MultitaskOptimizerWrapper",
    "Optimizer",
    "ParameterGroup",
    "Rows",
    "Saver",
    "SparseConditionalAccumulator",
    "SyncReplicasOptimizer",
    "TowerOptimizer",
    "UpdateRule",
    "Variable",
    "VariableClippingOptimizer",
    "WorkerFailedError",
    "clip_by_average_norm",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_gradients_by_global_norm",
    "embedding_lookup",
    "extend_with_decoupled_weight_decay",
    "get_cosine_decay_fn",
    "get_linear_decay_fn",
    "get_restart_decay_fn",
    "global_norm",
    "global_variables",
    "latest_checkpoint",
    "optimizer_from_bitsandbytes",
    "optimizer_from_torch",
    "optimizer_to_bitsandbytes",
    "optimizer_to_torch",
    "replicate",
    "rows",
    "trainable_variables",
    "update_rule",
    "value_and_gradients",
    "with_gradients",
    "with_torch",
]

# Where pyright did not see these lines, it would take the optimizers' names for private ones.
__all__ += optimizers.__all__  # type: ignore[attr-defined]  # mypy reads the imports above
__all__ += schedules.__all__

# Type checkers would take every name for one that this returns.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from gpuopt.near_names import describe_missing

        raise AttributeError(describe_missing(name, __all__), name=name)
