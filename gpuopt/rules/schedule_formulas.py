"""The formulas of schedules, in numpy.

After the step come a formula's constants, by keyword. Steps may be arrays. A formula computes in
the type of `step`, float32 or float64, and rounds each operation as TensorFlow does. Powers, logs
and cosines are computed in float64 and rounded once, so that they do not depend on the version
of numpy or the machine.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuopt.rules.random_bits import GOLDEN, mixed

# (step, count, **constants): `count` is the step as an integer, with all its digits.
Formula = Callable[..., Any]


def exponential_decay(
    step: Any, count: Any, *, learning_rate: Any, decay_steps: Any, decay_rate: Any, staircase: Any
) -> Any:
    return learning_rate * _power(decay_rate, _decays(step, decay_steps, staircase))


def inverse_time_decay(
    step: Any, count: Any, *, learning_rate: Any, decay_steps: Any, decay_rate: Any, staircase: Any
) -> Any:
    return learning_rate / (1 + decay_rate * _decays(step, decay_steps, staircase))


def polynomial_decay(
    step: Any,
    count: Any,
    *,
    learning_rate: Any,
    decay_steps: Any,
    end_learning_rate: Any,
    power: Any,
    cycle: Any,
) -> Any:
    if cycle:
        decay_steps = decay_steps * np.maximum(np.ceil(step / decay_steps), step.dtype.type(1))
    else:
        step = np.minimum(step, decay_steps)
    # With `cycle`, the next multiple of decay_steps may be rounded to less than the step.
    remaining = np.maximum(1 - step / decay_steps, step.dtype.type(0))
    return (learning_rate - end_learning_rate) * _power(remaining, power) + end_learning_rate


def piecewise_constant(step: Any, count: Any, *, boundaries: Any, values: Any) -> Any:
    return values[np.searchsorted(boundaries, count)]


def cosine_decay(
    step: Any, count: Any, *, learning_rate: Any, decay_steps: Any, alpha: Any, rest: Any
) -> Any:
    """Constants: `rest` is 1 - alpha, which TensorFlow rounds once."""
    wave = _wave(np.minimum(step, decay_steps) / decay_steps)
    return learning_rate * (rest * wave + alpha)


def cosine_decay_restarts(
    step: Any,
    count: Any,
    *,
    learning_rate: Any,
    first_decay_steps: Any,
    t_mul: Any,
    m_mul: Any,
    alpha: Any,
) -> Any:
    fraction = step / first_decay_steps
    if t_mul == 1:
        restarts = np.floor(fraction)
        fraction = fraction - restarts
    else:
        restarts = np.floor(_logarithm(1 - fraction * (1 - t_mul)) / _logarithm(t_mul))
        length = _power(t_mul, restarts)
        fraction = (fraction - (1 - length) / (1 - t_mul)) / length
    half = step.dtype.type(0.5) * _power(m_mul, restarts)
    return learning_rate * ((1 - alpha) * (half * (1 + _cosine(fraction))) + alpha)


def linear_cosine_decay(
    step: Any,
    count: Any,
    *,
    learning_rate: Any,
    decay_steps: Any,
    num_periods: Any,
    alpha: Any,
    beta: Any,
) -> Any:
    step = np.minimum(step, decay_steps)
    linear = (decay_steps - step) / decay_steps
    wave = _wave(2 * num_periods * (step / decay_steps))
    return learning_rate * ((alpha + linear) * wave + beta)


def noisy_linear_cosine_decay(
    step: Any,
    count: Any,
    *,
    learning_rate: Any,
    decay_steps: Any,
    initial_variance: Any,
    variance_decay: Any,
    num_periods: Any,
    alpha: Any,
    beta: Any,
    seed: Any,
) -> Any:
    real = step.dtype.type
    step = np.minimum(step, decay_steps)
    deviation = np.sqrt(initial_variance / _power(1 + step, variance_decay))
    linear = (decay_steps - step) / decay_steps + real(normal(seed, count)) * deviation
    wave = _wave(2 * num_periods * (step / decay_steps))
    return learning_rate * ((alpha + linear) * wave + beta)


def linear_warmup(step: Any, count: Any, *, start: Any, peak: Any, warmup_steps: Any) -> Any:
    """The warmup alone; the schedule after it is computed by itself."""
    return start + (peak - start) * (step / warmup_steps)


def one_cycle(
    step: Any,
    count: Any,
    *,
    start: Any,
    peak: Any,
    end: Any,
    warmup_steps: Any,
    total_steps: Any,
) -> Any:
    rising = step / np.maximum(warmup_steps, step.dtype.type(1))
    falling = (np.minimum(step, total_steps) - warmup_steps) / (total_steps - warmup_steps)
    up = peak + (start - peak) * _wave(rising)
    down = end + (peak - end) * _wave(falling)
    return np.where(step < warmup_steps, up, down)


def warmup_stable_decay(
    step: Any,
    count: Any,
    *,
    start: Any,
    peak: Any,
    end: Any,
    warmup_steps: Any,
    stable_steps: Any,
    decay_steps: Any,
) -> Any:
    past_stable = step - warmup_steps - stable_steps
    remaining = 1 - np.clip(past_stable / decay_steps, 0, 1)
    up = start + (peak - start) * (step / np.maximum(warmup_steps, step.dtype.type(1)))
    return np.where(step < warmup_steps, up, end + (peak - end) * remaining)


def constants_of(formula: Formula) -> tuple[str, ...]:
    """Returns the names of a formula's constants."""
    parameters = inspect.signature(formula).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


# How many random bits are added up: their sum is nearly normal.
_WORDS = 16
_BITS = 64 * _WORDS


def normal(seed: Any, count: Any) -> Any:
    """Returns a random number for each step, of mean 0 and variance 1.

    It depends on seed and step alone: it is the number of
    ones among 1,024 random bits, made continuous by a uniform number, in integers but for the last
    operation. The bits are those of SplitMix64 (Steele, Lea & Flood 2014), 17 words for each step.

    Args:
        seed: A whole number from 0.
        count: int64, the steps.
    """
    first = np.asarray(count).astype(np.uint64) * np.uint64(_WORDS + 1)
    key = mixed(np.uint64(seed) + GOLDEN)
    words = mixed(key + np.add.outer(first, np.arange(_WORDS + 1, dtype=np.uint64)) * GOLDEN)
    ones = np.bitwise_count(words[..., 1:]).sum(axis=-1, dtype=np.int64)
    uniform = (words[..., 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return ((ones - _BITS // 2).astype(np.float64) - 0.5 + uniform) / math.sqrt(
        _BITS / 4 + 1.0 / 12.0
    )


def _decays(step: Any, decay_steps: Any, staircase: Any) -> Any:
    decays = step / decay_steps
    return np.floor(decays) if staircase else decays


def _wave(fraction: Any) -> Any:
    """Returns half a cosine wave, which falls from 1 at 0 to 0 at 1."""
    return fraction.dtype.type(0.5) * (1 + _cosine(fraction))


def _cosine(half_turns: Any) -> Any:
    real = half_turns.dtype.type
    return real(np.cos(np.float64(real(math.pi) * half_turns)))


def _power(base: Any, exponent: Any) -> Any:
    return exponent.dtype.type(np.float64(base) ** np.float64(exponent))


def _logarithm(x: Any) -> Any:
    return x.dtype.type(np.log(np.float64(x)))
