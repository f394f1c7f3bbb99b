"""Schedules that begin with a warm-up, which TensorFlow 1 does not have."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules import schedule_formulas as formulas
from gpuopt.schedules.numbers import number, positive, real_of, whole
from gpuopt.schedules.schedule import Schedule, make
from gpuopt.step.step import checked_global_step


def linear_warmup(
    learning_rate: float | Schedule,
    global_step: Any,
    warmup_steps: int,
    start_learning_rate: float = 0.0,
) -> Schedule:
    """Returns a value that rises on a straight line, and then goes on as another schedule.

    Args:
        learning_rate: The value after the warm-up, or a schedule of the same global step, whose own
            steps are counted from the end of the warm-up.
        global_step: The scalar variable or array that is followed.
        warmup_steps: At which step the warm-up ends; above 0.
        start_learning_rate: The value at step 0.

    Raises:
        TypeError: an argument is not of its type; `global_step` is no scalar variable or array.
        ValueError: a number is not finite, `warmup_steps` is not a whole number above 0, or the
            schedule follows another variable.
    """
    given = locals()
    if isinstance(learning_rate, Schedule):
        then, counter = learning_rate, checked_global_step(global_step)
        if then.global_step.identity is not counter.identity:
            raise ValueError(
                f'linear_warmup follows the global_step "{counter.name}", and the schedule after '
                f'it follows "{then.global_step.name}": {then!r}'
            )
    else:
        real = real_of(learning_rate, "learning_rate")
        constant = {
            "boundaries": np.array([], np.int64),
            "values": np.array([number(learning_rate, "learning_rate", real)], real),
        }
        then = make(formulas.piecewise_constant, constant, real, "linear_warmup", given)
    dtype: Any = then.dtype.type
    constants = {
        "start": number(start_learning_rate, "start_learning_rate", dtype),
        "peak": then.at(0),
        "warmup_steps": dtype(whole(warmup_steps, "warmup_steps", least=1)),
    }
    return make(formulas.linear_warmup, constants, dtype, "linear_warmup", given, then)


def one_cycle(
    max_learning_rate: float,
    global_step: Any,
    total_steps: int,
    warmup_fraction: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """Returns one rise and one fall along cosine waves (Smith & Topin 2018, section 2).

    The value rises from `max_learning_rate / div_factor` and falls to that, divided by
    `final_div_factor`, where it stays. Smith and Topin take straight lines; cosine waves, and the
    defaults, are those of torch and optax.

    Args:
        max_learning_rate: The value at the end of the rise.
        global_step: The scalar variable or array that is followed.
        total_steps: At which step the fall ends; above 0.
        warmup_fraction: The share of the rise, from 0 to below 1; rounded down to a step.
        div_factor: See above; above 0.
        final_div_factor: See above; above 0.

    Raises:
        TypeError: an argument is not of its type; `global_step` is no scalar variable or array.
        ValueError: a number is not finite, or not in its range.
    """
    given = locals()
    real = real_of(max_learning_rate, "max_learning_rate")
    peak = number(max_learning_rate, "max_learning_rate", real)
    total = whole(total_steps, "total_steps", least=1)
    if not 0 <= number(warmup_fraction, "warmup_fraction", np.float64) < 1:
        raise ValueError(f"warmup_fraction must be from 0 to below 1, got {warmup_fraction!r}")
    start = ignore_fp_warnings(np.divide, peak, positive(div_factor, "div_factor", real))
    last = positive(final_div_factor, "final_div_factor", real)
    constants = {
        "start": start,
        "peak": peak,
        "end": ignore_fp_warnings(np.divide, start, last),
        "warmup_steps": real(int(warmup_fraction * total)),
        "total_steps": real(total),
    }
    return make(formulas.one_cycle, constants, real, "one_cycle", given)


def warmup_stable_decay(
    learning_rate: float,
    global_step: Any,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    start_learning_rate: float = 0.0,
    end_learning_rate: float = 0.0,
) -> Schedule:
    """Returns a straight rise, a constant, and a straight fall (Hägele et al. 2024, section 3).

    Args:
        learning_rate: The constant in the middle.
        global_step: The scalar variable or array that is followed.
        warmup_steps: How long the value rises; from 0.
        stable_steps: How long it stays; from 0.
        decay_steps: How long it falls; above 0.
        start_learning_rate: The value at step 0, unless `warmup_steps` is 0.
        end_learning_rate: The value from the end of the fall on.

    Raises:
        TypeError: an argument is not of its type; `global_step` is no scalar variable or array.
        ValueError: a number is not finite, or a number of steps is not whole, or not in its range.
    """
    given = locals()
    real = real_of(learning_rate, "learning_rate")
    constants = {
        "start": number(start_learning_rate, "start_learning_rate", real),
        "peak": number(learning_rate, "learning_rate", real),
        "end": number(end_learning_rate, "end_learning_rate", real),
        "warmup_steps": real(whole(warmup_steps, "warmup_steps")),
        "stable_steps": real(whole(stable_steps, "stable_steps")),
        "decay_steps": real(whole(decay_steps, "decay_steps", least=1)),
    }
    return make(formulas.warmup_stable_decay, constants, real, "warmup_stable_decay", given)
