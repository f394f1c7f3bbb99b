"""Optimizers that add something to another one's steps, most of them TensorFlow's contrib's."""

from gpuopt.wrappers.accumulation import GradientAccumulationOptimizer
from gpuopt.wrappers.agn import AGNCustomGetter, AGNOptimizer
from gpuopt.wrappers.drop_stale_gradient import DropStaleGradientOptimizer
from gpuopt.wrappers.elastic_average import ElasticAverageCustomGetter, ElasticAverageOptimizer
from gpuopt.wrappers.gradient_clipping import clip_gradients_by_global_norm
from gpuopt.wrappers.loss_scale import LossScaleOptimizer
from gpuopt.wrappers.loss_scale_managers import (
    DynamicLossScale,
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from gpuopt.wrappers.model_average import ModelAverageCustomGetter, ModelAverageOptimizer
from gpuopt.wrappers.moving_average import MovingAverageOptimizer
from gpuopt.wrappers.multitask import MultitaskOptimizerWrapper
from gpuopt.wrappers.variable_clipping import VariableClippingOptimizer

__all__ = [
    "AGNCustomGetter",
    "AGNOptimizer",
    "DropStaleGradientOptimizer",
    "DynamicLossScale",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "ExponentialUpdateLossScaleManager",
    "FixedLossScaleManager",
    "GradientAccumulationOptimizer",
    "LossScaleManager",
    "LossScaleOptimizer",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "MovingAverageOptimizer",
    "MultitaskOptimizerWrapper",
    "VariableClippingOptimizer",
    "clip_gradients_by_global_norm",
]
