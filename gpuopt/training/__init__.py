"""What accompanies training beside the optimizers."""

from gpuopt.training.moving_average import ExponentialMovingAverage

__all__ = ["ExponentialMovingAverage"]
