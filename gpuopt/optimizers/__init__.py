"""The optimizers, one module each."""

from gpuopt.optimizers.adadelta import AdadeltaOptimizer
from gpuopt.optimizers.adagrad import AdagradOptimizer
from gpuopt.optimizers.adagrad_da import AdagradDAOptimizer
from gpuopt.optimizers.adam import AdamOptimizer
from gpuopt.optimizers.ftrl import FtrlOptimizer
from gpuopt.optimizers.gradient_descent import GradientDescentOptimizer
from gpuopt.optimizers.lazy_adam import LazyAdamOptimizer
from gpuopt.optimizers.momentum import MomentumOptimizer
from gpuopt.optimizers.proximal_adagrad import ProximalAdagradOptimizer
from gpuopt.optimizers.proximal_gradient_descent import ProximalGradientDescentOptimizer
from gpuopt.optimizers.rms_prop import RMSPropOptimizer

__all__ = [
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "LazyAdamOptimizer",
    "MomentumOptimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
]
