"""Schedules: hyperparameters that follow the global step."""

from gpuopt.schedules.decays import (
    cosine_decay,
    cosine_decay_restarts,
    exponential_decay,
    inverse_time_decay,
    linear_cosine_decay,
    natural_exp_decay,
    noisy_linear_cosine_decay,
    piecewise_constant,
    piecewise_constant_decay,
    polynomial_decay,
)
from gpuopt.schedules.schedule import Schedule
from gpuopt.schedules.warmups import linear_warmup, one_cycle, warmup_stable_decay

__all__ = [
    "Schedule",
    "cosine_decay",
    "cosine_decay_restarts",
    "exponential_decay",
    "inverse_time_decay",
    "linear_cosine_decay",
    "linear_warmup",
    "natural_exp_decay",
    "noisy_linear_cosine_decay",
    "one_cycle",
    "piecewise_constant",
    "piecewise_constant_decay",
    "polynomial_decay",
    "warmup_stable_decay",
]
