"""Wrappers of TensorFlow's contrib: optimizers that add something to another one's steps."""

from gpuopt.wrappers.gradient_clipping import clip_gradients_by_global_norm
from gpuopt.wrappers.moving_average import MovingAverageOptimizer
from gpuopt.wrappers.multitask import MultitaskOptimizerWrapper
from gpuopt.wrappers.variable_clipping import VariableClippingOptimizer

__all__ = [
    "MovingAverageOptimizer",
    "MultitaskOptimizerWrapper",
    "VariableClippingOptimizer",
    "clip_gradients_by_global_norm",
]
