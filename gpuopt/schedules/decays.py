"""TensorFlow 1's decays of the learning rate, with its names, arguments and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from itertools import pairwise
from typing import Any

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules import schedule_formulas as formulas
from gpuopt.rules.schedule_formulas import Formula, constants_of
from gpuopt.schedules.numbers import flag, number, positive, real_of, whole
from gpuopt.schedules.schedule import Schedule, make

# Arguments that are no numbers of any sign.
_FLAGS = ("cycle", "staircase")
_POSITIVE = ("decay_steps", "first_decay_steps", "t_mul")


def exponential_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Schedule:
    """Returns `learning_rate * decay_rate ** (step / decay_steps)`.

    Args:
        learning_rate: The value at step 0.
        global_step: The scalar variable or array that is followed.
        decay_steps: After how many steps the value is multiplied by `decay_rate`; above 0.
        decay_rate: See there.
        staircase: Whether the exponent is rounded down.
        name: Ignored.

    Raises:
        TypeError: an argument is not of its type; `global_step` is no scalar variable or array.
        ValueError: a number is not finite, or `decay_steps` is not above 0.
    """
    return _with_arguments(formulas.exponential_decay, locals())


def natural_exp_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Schedule:
    """Returns `learning_rate * exp(-decay_rate) ** (step / decay_steps)`; see `exponential_decay`.

    Raises:
        TypeError, ValueError: See `exponential_decay`.
    """
    given = locals()
    real = real_of(learning_rate, "learning_rate")
    exact = ignore_fp_warnings(np.exp, -np.float64(number(decay_rate, "decay_rate", real)))
    rate = number(exact, "exp(-decay_rate)", real)
    name = "natural_exp_decay"
    return _with_arguments(formulas.exponential_decay, given, name, decay_rate=rate)


def inverse_time_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Schedule:
    """Returns `learning_rate / (1 + decay_rate * step / decay_steps)`; see `exponential_decay`.

    Raises:
        TypeError, ValueError: See `exponential_decay`.
    """
    return _with_arguments(formulas.inverse_time_decay, locals())


def polynomial_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> Schedule:
    """Returns `(learning_rate - end) * (1 - step / decay_steps) ** power + end`.

    Args:
        learning_rate: The value at step 0.
        global_step: The scalar variable or array that is followed.
        decay_steps: The step from which on the value is `end_learning_rate`; above 0.
        end_learning_rate: `end` above.
        power: See there.
        cycle: Whether, at the end, the value rises again and then decays until the next multiple of
            `decay_steps`, by `(1 - step / that multiple)`.
        name: Ignored.

    Raises:
        TypeError, ValueError: See `exponential_decay`.
    """
    return _with_arguments(formulas.polynomial_decay, locals())


def piecewise_constant(
    x: Any, boundaries: Sequence[float], values: Sequence[float], name: str | None = None
) -> Schedule:
    """Returns `values[i]` up to and including step `boundaries[i]`, and after all the last value.

    Args:
        x: The scalar variable or array that is followed: the global step.
        boundaries: At least one, strictly increasing.
        values: One more than there are boundaries.
        name: Ignored.

    Raises:
        TypeError: an argument is not of its type; `x` is no scalar variable or array; only some
            values are float64.
        ValueError: a number is not finite; `boundaries` do not increase; there is not one value
            more than there are boundaries.
    """
    given = locals()
    for name, pieces in (("boundaries", boundaries), ("values", values)):
        if not isinstance(pieces, Sized) or np.ndim(pieces) == 0:
            raise TypeError(f"{name} must be a list of numbers, got {pieces!r}")
    if not len(boundaries) or len(values) != len(boundaries) + 1:
        raise ValueError(
            "piecewise_constant takes one or more boundaries, and one value more: got "
            f"{len(boundaries)} boundaries and {len(values)} values"
        )
    # A step is at most a boundary if it is at most the whole number below.
    whole_boundaries = [
        whole(
            math.floor(number(each, f"boundaries[{i}]", np.float64)), f"boundaries[{i}]", -(2**53)
        )
        for i, each in enumerate(boundaries)
    ]
    for i, (left, right) in enumerate(pairwise(boundaries)):
        if not left < right:
            raise ValueError(
                f"boundaries must increase, got {right!r} after {left!r} (boundaries[{i + 1}])"
            )
    types = {real_of(value, f"values[{i}]") for i, value in enumerate(values)}
    if len(types) > 1:
        raise TypeError(f"values must be of one type, got float32 and float64: {values!r}")
    [real] = types
    constants = {
        "boundaries": np.array(whole_boundaries, np.int64),
        "values": np.array([number(v, f"values[{i}]", real) for i, v in enumerate(values)], real),
    }
    return make(formulas.piecewise_constant, constants, real, "piecewise_constant", given)


piecewise_constant_decay = piecewise_constant


def cosine_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    alpha: float = 0.0,
    name: str | None = None,
) -> Schedule:
    """Returns `learning_rate` times half a cosine wave, from 1 to `alpha`.

    See Loshchilov & Hutter 2017 (SGDR), section 3.

    Args:
        learning_rate: The value at step 0.
        global_step: The scalar variable or array that is followed.
        decay_steps: The step from which on the value stays; above 0.
        alpha: The last value, as a share of `learning_rate`.
        name: Ignored.

    Raises:
        TypeError, ValueError: See `exponential_decay`.
    """
    given = locals()
    real = real_of(learning_rate, "learning_rate")
    number(alpha, "alpha", real)
    # TensorFlow rounds alpha after the subtraction, and for float64 not at all.
    rounded = {"alpha": real(alpha), "rest": real(1 - float(alpha))}
    return _with_arguments(formulas.cosine_decay, given, **rounded)


def cosine_decay_restarts(
    learning_rate: float,
    global_step: Any,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
    name: str | None = None,
) -> Schedule:
    """Returns cosine decays one after the other (Loshchilov & Hutter 2017, SGDR, section 3).

    Args:
        learning_rate: The value at step 0.
        global_step: The scalar variable or array that is followed.
        first_decay_steps: How long the first decay is; above 0.
        t_mul: How many times as long as the one before each decay is; above 0.
        m_mul: By what the height of each decay is multiplied, relative to the one before.
        alpha: The value at the end of a decay, as a share of `learning_rate`.
        name: Ignored.

    Raises:
        TypeError, ValueError: See `exponential_decay`; or `t_mul` is not above 0.
    """
    return _with_arguments(formulas.cosine_decay_restarts, locals())


def linear_cosine_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
    name: str | None = None,
) -> Schedule:
    """Returns `learning_rate * ((alpha + linear) * wave + beta)` (Bello et al. 2017, section 5).

    `linear` falls from 1 to 0 in `decay_steps`, where the value stays from then on, and `wave` is
    `(1 + cos(2 * pi * num_periods * step / decay_steps)) / 2`.

    Raises:
        TypeError, ValueError: See `exponential_decay`.
    """
    return _with_arguments(formulas.linear_cosine_decay, locals())


def noisy_linear_cosine_decay(
    learning_rate: float,
    global_step: Any,
    decay_steps: float,
    initial_variance: float = 1.0,
    variance_decay: float = 0.55,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
    name: str | None = None,
    seed: int = 0,
) -> Schedule:
    """Returns `linear_cosine_decay` with noise in its `linear` (Bello et al. 2017, section 5).

    The noise is normal, of variance `initial_variance / (1 + step) ** variance_decay`, where `step`
    stops at `decay_steps`. It depends on the seed and the step alone: a run that is repeated, or
    restored, has the same learning rates, on any device.

    Args:
        learning_rate: See `linear_cosine_decay`, as for all that is not listed here.
        global_step: The scalar variable or array that is followed.
        decay_steps: Above 0.
        initial_variance: From 0.
        variance_decay: See above.
        num_periods: See there.
        alpha: See there.
        beta: See there.
        name: Ignored.
        seed: A whole number from 0.

    Raises:
        TypeError, ValueError: See `exponential_decay`; or the variance is below 0.
    """
    given = locals()
    real = real_of(learning_rate, "learning_rate")
    variance = number(initial_variance, "initial_variance", real)
    if variance < 0:
        raise ValueError(f"initial_variance must not be below 0, got {initial_variance!r}")
    whole_seed = whole(seed, "seed")
    return _with_arguments(formulas.noisy_linear_cosine_decay, given, seed=whole_seed)


def _with_arguments(
    formula: Formula, given: Mapping[str, Any], name: str | None = None, /, **checked: Any
) -> Schedule:
    """Makes a schedule whose constants are the arguments of the same names.

    Args:
        formula: What is computed.
        given: What the public function was given: its `locals()`.
        name: The public function, if it is not called as the formula is.
        **checked: Constants that are something else than the arguments.
    """
    real = real_of(given["learning_rate"], "learning_rate")
    constants = {}
    for each in constants_of(formula):
        if each in checked:
            constants[each] = checked[each]
        elif each in _FLAGS:
            constants[each] = flag(given[each], each)
        elif each in _POSITIVE:
            constants[each] = positive(given[each], each, real)
        else:
            constants[each] = number(given[each], each, real)
    return make(formula, constants, real, name or formula.__name__, given)
