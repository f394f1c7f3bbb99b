"""The schedules once more, from papers and documentation, in Python's floats, step by step.

Imports nothing of gpuopt. Each function takes a step, and TensorFlow's names.
"""

import math
from itertools import pairwise


def exponential_decay(step, learning_rate, decay_steps, decay_rate, staircase=False):
    periods = step // decay_steps if staircase else step / decay_steps
    return learning_rate * decay_rate**periods


def natural_exp_decay(step, learning_rate, decay_steps, decay_rate, staircase=False):
    periods = step // decay_steps if staircase else step / decay_steps
    return learning_rate * math.exp(-decay_rate * periods)


def inverse_time_decay(step, learning_rate, decay_steps, decay_rate, staircase=False):
    periods = step // decay_steps if staircase else step / decay_steps
    return learning_rate / (1 + decay_rate * periods)


def polynomial_decay(
    step, learning_rate, decay_steps, end_learning_rate=0.0001, power=1.0, cycle=False
):
    if cycle:
        until = decay_steps
        while until < step:
            until += decay_steps
    else:
        until = decay_steps
        step = min(step, decay_steps)
    left = (until - step) / until
    return end_learning_rate + (learning_rate - end_learning_rate) * left**power


def piecewise_constant(step, boundaries, values):
    for boundary, value in zip(boundaries, values[:-1], strict=True):
        if step <= boundary:
            return value
    return values[-1]


def cosine_decay(step, learning_rate, decay_steps, alpha=0.0):
    angle = math.pi * min(1, step / decay_steps)
    return learning_rate * (alpha + (1 - alpha) * math.cos(angle / 2) ** 2)


def cosine_decay_restarts(step, learning_rate, first_decay_steps, t_mul=2.0, m_mul=1.0, alpha=0.0):
    """Loshchilov & Hutter 2017, eq. 5: restart after restart."""
    begin, length, height = 0.0, float(first_decay_steps), 1.0
    while step >= begin + length:
        begin, length, height = begin + length, length * t_mul, height * m_mul
    angle = math.pi * (step - begin) / length
    return learning_rate * (alpha + (1 - alpha) * height * math.cos(angle / 2) ** 2)


def linear_cosine_decay(step, learning_rate, decay_steps, num_periods=0.5, alpha=0.0, beta=0.001):
    """Bello et al. 2017, section 5."""
    share = min(1, step / decay_steps)
    return learning_rate * (
        (alpha + 1 - share) * math.cos(math.pi * num_periods * share) ** 2 + beta
    )


def linear_warmup(step, learning_rate, warmup_steps, start_learning_rate=0.0):
    """`learning_rate` is a number, or a function of the steps after the warm-up."""
    after = learning_rate if callable(learning_rate) else lambda step: learning_rate
    if step >= warmup_steps:
        return after(step - warmup_steps)
    share = step / warmup_steps
    return share * after(0) + (1 - share) * start_learning_rate


def one_cycle(
    step,
    max_learning_rate,
    total_steps,
    warmup_fraction=0.3,
    div_factor=25.0,
    final_div_factor=1e4,
):
    """optax's cosine_onecycle_schedule: between knots along half a cosine."""
    first = max_learning_rate / div_factor
    top = math.floor(warmup_fraction * total_steps)
    knots = [(0, first), (top, max_learning_rate), (total_steps, first / final_div_factor)]
    for (begin, left), (end, right) in pairwise(knots):
        if begin <= step < end:
            share = math.sin(math.pi / 2 * (step - begin) / (end - begin)) ** 2
            return left + (right - left) * share
    return knots[-1][1]


def warmup_stable_decay(
    step,
    learning_rate,
    warmup_steps,
    stable_steps,
    decay_steps,
    start_learning_rate=0.0,
    end_learning_rate=0.0,
):
    """Hägele et al. 2024, eq. 1, with a linear cooldown."""
    if step < warmup_steps:
        return start_learning_rate + (learning_rate - start_learning_rate) * step / warmup_steps
    cooled = max(0, step - warmup_steps - stable_steps)
    if cooled >= decay_steps:
        return end_learning_rate
    return learning_rate + (end_learning_rate - learning_rate) * cooled / decay_steps
