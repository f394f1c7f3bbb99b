"""TensorFlow's names that few need: most of tf.contrib's, and aliases."""

from gpuopt.clipping import clip_by_average_norm, clip_by_norm
from gpuopt.optimizers.base.sign_decay import (
    get_cosine_decay_fn,
    get_linear_decay_fn,
    get_restart_decay_fn,
)
from gpuopt.optimizers.base.weight_decay import extend_with_decoupled_weight_decay
from gpuopt.schedules import (
    inverse_time_decay,
    linear_cosine_decay,
    natural_exp_decay,
    noisy_linear_cosine_decay,
    piecewise_constant_decay,
)
from gpuopt.tables import Rows
from gpuopt.variables.variable import global_variables, trainable_variables
from gpuopt.wrappers import (
    AGNCustomGetter,
    AGNOptimizer,
    DropStaleGradientOptimizer,
    ElasticAverageCustomGetter,
    ElasticAverageOptimizer,
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
    ModelAverageCustomGetter,
    ModelAverageOptimizer,
    MultitaskOptimizerWrapper,
    VariableClippingOptimizer,
    clip_gradients_by_global_norm,
)

__all__ = [
    "AGNCustomGetter",
    "AGNOptimizer",
    "DropStaleGradientOptimizer",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "LossScaleManager",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MultitaskOptimizerWrapper",
    "Rows",
    "VariableClippingOptimizer",
    "clip_by_average_norm",
    "clip_by_norm",
    "clip_gradients_by_global_norm",
    "extend_with_decoupled_weight_decay",
    "get_cosine_decay_fn",
    "get_linear_decay_fn",
    "get_restart_decay_fn",
    "global_variables",
    "inverse_time_decay",
    "linear_cosine_decay",
    "natural_exp_decay",
    "noisy_linear_cosine_decay",
    "piecewise_constant_decay",
    "trainable_variables",
]
