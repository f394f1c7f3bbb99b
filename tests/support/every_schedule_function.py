"""Schedules of every function, with settings that reach each branch of its formula."""

from __future__ import annotations

from inspect import isfunction, signature
from typing import Any

from gpuopt.rules import schedule_formulas

# What schedules compute: each takes a step first.
FORMULAS = {
    each
    for name, each in vars(schedule_formulas).items()
    if isfunction(each)
    and not name.startswith("_")
    and next(iter(signature(each).parameters)) == "step"
}

# (function, arguments without the global step and the learning rate)
DECAYS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, settings)
        for name in ("exponential_decay", "natural_exp_decay", "inverse_time_decay")
        for settings in (
            {"decay_steps": 100, "decay_rate": 0.9},
            {"decay_steps": 37.5, "decay_rate": 0.5, "staircase": True},
        )
    ),
    ("polynomial_decay", {"decay_steps": 150, "end_learning_rate": 0.01}),
    (
        "polynomial_decay",
        {"decay_steps": 40, "end_learning_rate": 0.0, "power": 0.5, "cycle": True},
    ),
    ("polynomial_decay", {"decay_steps": 37, "end_learning_rate": 0.3, "power": 2, "cycle": True}),
    ("cosine_decay", {"decay_steps": 200, "alpha": 0.1}),
    ("cosine_decay_restarts", {"first_decay_steps": 30}),
    ("cosine_decay_restarts", {"first_decay_steps": 45, "t_mul": 1, "m_mul": 0.8, "alpha": 0.1}),
    ("cosine_decay_restarts", {"first_decay_steps": 17, "t_mul": 1.5, "m_mul": 0.7}),
    ("linear_cosine_decay", {"decay_steps": 170, "beta": 0.0}),
    ("linear_cosine_decay", {"decay_steps": 90, "num_periods": 3, "alpha": 0.2, "beta": 0.01}),
    ("one_cycle", {"total_steps": 250}),
    ("one_cycle", {"total_steps": 90, "warmup_fraction": 0, "div_factor": 3}),
    ("warmup_stable_decay", {"warmup_steps": 20, "stable_steps": 100, "decay_steps": 50}),
    (
        "warmup_stable_decay",
        {"warmup_steps": 0, "stable_steps": 0, "decay_steps": 60, "end_learning_rate": 0.01},
    ),
    ("linear_warmup", {"warmup_steps": 33, "start_learning_rate": 0.01}),
]
PIECES: dict[str, Any] = {"boundaries": [10, 25.5, 100], "values": [0.5, 0.25, 0.125, 0.1]}
NOISY: dict[str, Any] = {"decay_steps": 120, "initial_variance": 0.5, "seed": 7}
