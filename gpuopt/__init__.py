"""TensorFlow 1's optimizer system for numpy and CuPy arrays."""

from typing import TYPE_CHECKING, Any

from gpuopt import contrib, optimizers
from gpuopt.autodiff import embedding_lookup, with_gradients, with_torch
from gpuopt.checkpoint import Saver, latest_checkpoint
from gpuopt.clipping import clip_by_global_norm, clip_by_value, global_norm

# Names that are not in __all__: those of contrib, and those that another module exports.
from gpuopt.contrib import *  # noqa: F403
from gpuopt.device import Device as Device
from gpuopt.distributed import ConditionalAccumulator as ConditionalAccumulator
from gpuopt.distributed import MirroredStrategy, SyncReplicasOptimizer, TowerOptimizer
from gpuopt.distributed import SparseConditionalAccumulator as SparseConditionalAccumulator
from gpuopt.distributed import replicate as replicate
from gpuopt.errors import CancelledError as CancelledError
from gpuopt.errors import CheckpointError as CheckpointError
from gpuopt.errors import DeadlineExceededError as DeadlineExceededError
from gpuopt.errors import DeviceUnavailableError as DeviceUnavailableError
from gpuopt.errors import GpuoptError as GpuoptError
from gpuopt.errors import SeveralProcessesWarning as SeveralProcessesWarning
from gpuopt.errors import WorkerFailedError as WorkerFailedError
from gpuopt.interop import optimizer_from_bitsandbytes as optimizer_from_bitsandbytes
from gpuopt.interop import optimizer_from_torch as optimizer_from_torch
from gpuopt.interop import optimizer_to_bitsandbytes as optimizer_to_bitsandbytes
from gpuopt.interop import optimizer_to_torch as optimizer_to_torch
from gpuopt.optimizer import Optimizer
from gpuopt.optimizers import *  # noqa: F403
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.rules.sources import CudaSource as CudaSource
from gpuopt.rules.update_rule import UpdateRule as UpdateRule
from gpuopt.rules.update_rule import update_rule
from gpuopt.schedules import Schedule as Schedule
from gpuopt.schedules import (
    cosine_decay,
    cosine_decay_restarts,
    exponential_decay,
    linear_warmup,
    one_cycle,
    piecewise_constant,
    polynomial_decay,
    warmup_stable_decay,
)
from gpuopt.short_names import *  # noqa: F403
from gpuopt.step.loss import value_and_gradients
from gpuopt.tables import rows
from gpuopt.training import ExponentialMovingAverage
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable
from gpuopt.version import __version__ as __version__
from gpuopt.wrappers import (
    DynamicLossScale,
    GradientAccumulationOptimizer,
    LossScaleOptimizer,
    MovingAverageOptimizer,
)

__all__ = [
    "DynamicLossScale",
    "ExponentialMovingAverage",
    "GradientAccumulationOptimizer",
    "IndexedSlices",
    "LossScaleOptimizer",
    "MirroredStrategy",
    "MovingAverageOptimizer",
    "Optimizer",
    "ParameterGroup",
    "Saver",
    "SyncReplicasOptimizer",
    "TowerOptimizer",
    "Variable",
    "clip_by_global_norm",
    "clip_by_value",
    "cosine_decay",
    "cosine_decay_restarts",
    "embedding_lookup",
    "exponential_decay",
    "global_norm",
    "latest_checkpoint",
    "linear_warmup",
    "one_cycle",
    "piecewise_constant",
    "polynomial_decay",
    "rows",
    "update_rule",
    "value_and_gradients",
    "warmup_stable_decay",
    "with_gradients",
    "with_torch",
]

# Where pyright did not see these lines, it would take the optimizers' names for private ones.
__all__ += optimizers.__all__  # type: ignore[attr-defined]  # mypy reads the imports above

# Type checkers would take every name for one that this returns.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from gpuopt.near_names import describe_missing

        raise AttributeError(describe_missing(name, [*__all__, *contrib.__all__]), name=name)

    def __dir__() -> list[str]:
        modules = "contrib device distributed errors interop optimizers schedules"
        return [*__all__, *modules.split(), "__version__"]
