"""Moving averages of variables."""

from gpuopt.training.moving_average import ExponentialMovingAverage

__all__ = ["ExponentialMovingAverage"]
