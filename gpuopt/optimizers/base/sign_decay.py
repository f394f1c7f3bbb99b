"""How much the signs count in AddSign and PowerSign, as the steps go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpuopt.optimizers.base.arguments import Common
from gpuopt.optimizers.base.declared import Hyperparameter
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer

# Takes the global step, a Variable, or None where `apply_gradients` is given none.
SignDecayFunction = Callable[[Any], Any]

SIGN_DECAY = (
    "Returns `decay` for the `global_step` that `apply_gradients` is given, before it is counted "
    "up: `get_linear_decay_fn(...)`, say. Called once in each step."
)


class SignOptimizer(RuleOptimizer):
    """Base of AddSign and PowerSign: has a hyperparameter `decay` that the steps determine."""

    derived_hyperparameters = ("decay",)

    def __init__(
        self,
        common: Common,
        sign_decay_fn: SignDecayFunction | None,
        /,
        **hyperparameters: Hyperparameter,
    ) -> None:
        if not (sign_decay_fn is None or callable(sign_decay_fn)):
            raise TypeError(f"sign_decay_fn must be a function, got {sign_decay_fn!r}")
        self._sign_decay_fn = sign_decay_fn
        super().__init__(common, **hyperparameters)

    def _all_hyperparameters(self, given: dict[str, Hyperparameter]) -> dict[str, Hyperparameter]:
        # The function must not hold the optimizer, which would hold it.
        this_thread, decay_at = self.this_thread, self._sign_decay_fn
        decay = 1.0 if decay_at is None else lambda: decay_at(this_thread.global_step)
        return {**given, "decay": decay}


def get_linear_decay_fn(decay_steps: int) -> SignDecayFunction:
    """Returns a function of the global step that falls from 1 to 0 within `decay_steps` steps.

    Raises:
        ValueError: `decay_steps` is not positive.
    """
    _check_steps(decay_steps)

    def linear_decay(global_step: Any) -> np.float32:
        done = _steps_done(global_step, decay_steps, "linear_decay")
        return _fraction(decay_steps - done, decay_steps)

    return linear_decay


def get_cosine_decay_fn(
    decay_steps: int, num_periods: float = 0.5, zero_after: float | None = None
) -> SignDecayFunction:
    """Returns a function of the global step: a cosine between 1 and 0.

    Args:
        decay_steps: After these the value stays.
        num_periods: How many periods the cosine has until then.
        zero_after: After so many periods, the value is 0.

    Raises:
        ValueError: `decay_steps` is not positive.
    """
    _check_steps(decay_steps)

    def cosine_decay(global_step: Any) -> np.float32:
        done = _steps_done(global_step, decay_steps, "cosine_decay")
        half_periods = np.float32(2 * num_periods) * _fraction(done, decay_steps)
        if zero_after is not None and half_periods >= 2 * zero_after:
            return np.float32(0)
        return _raised_cosine(half_periods)

    return cosine_decay


def get_restart_decay_fn(
    decay_steps: int, num_periods: float = 1, zero_after: float | None = None
) -> SignDecayFunction:
    """Returns a function of the global step: half a cosine from 1 to 0, again and again.

    Args:
        decay_steps: After these the value stays.
        num_periods: How often the value falls until then.
        zero_after: After so many times, the value is 0.

    Raises:
        ValueError: `decay_steps` is not positive.
    """
    _check_steps(decay_steps)

    def restart_decay(global_step: Any) -> np.float32:
        done = _steps_done(global_step, decay_steps, "restart_decay")
        periods = np.float32(num_periods) * np.float32(done)
        if zero_after is not None and _fraction(periods, decay_steps) >= zero_after:
            return np.float32(0)
        return _raised_cosine(_fraction(np.mod(periods, np.float32(decay_steps)), decay_steps))

    return restart_decay


def _check_steps(decay_steps: int) -> None:
    if not decay_steps > 0:
        raise ValueError(f"decay_steps must be positive, got {decay_steps!r}")


def _steps_done(global_step: Any, decay_steps: int, function: str) -> int:
    if global_step is None:
        raise ValueError(
            f"{function} needs the global step: pass global_step to minimize or apply_gradients"
        )
    return min(int(global_step), decay_steps)


def _fraction(part: float | np.float32, decay_steps: int) -> np.float32:
    # TensorFlow computes in float32, and its graph optimizer multiplies where a constant divides.
    return np.float32(part) * (np.float32(1) / np.float32(decay_steps))


def _raised_cosine(half_periods: np.float32) -> np.float32:
    return np.float32(0.5 * (1 + np.cos(np.float32(math.pi) * half_periods)))
