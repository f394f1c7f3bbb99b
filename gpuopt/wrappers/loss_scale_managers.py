"""Managers of loss scales: contrib's, and TensorFlow 2's dynamic rule."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizers.base.arguments import refuse_unknown_arguments
from gpuopt.rules.loss_scaling import LARGEST_SCALE, ScaleRule, scale_after
from gpuopt.state.loss_scales import SCALE, STEPS, ZERO, Start
from gpuopt.variables.gate import writing
from gpuopt.variables.undo import Undo
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import checked_number


class LossScaleManager(ABC):
    """What `LossScaleOptimizer` asks for the scale of the loss, as contrib's.

    A subclass of a user's own decides on the host, which waits for each step's gradients.
    """

    @abstractmethod
    def get_loss_scale(self) -> Any:
        """Returns the scale, a number from 1 to 2**126."""

    @abstractmethod
    def update_loss_scale(self, finite_grads: Any) -> None:
        """Called once in each step.

        Args:
            finite_grads: Whether all gradients of the step are finite.
        """


class RuleManager(LossScaleManager):
    """Base of the managers whose rule a GPU knows, too.

    Attributes:
        rule: How the scale changes.
        variables: The scale (float32) and, if it changes, the counts of good and bad steps (int64):
            variables, which a `Saver` saves.
        starts: What they begin with.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        refuse_unknown_arguments(cls, kwargs)
        return super().__new__(cls)

    def __init__(self, loss_scale: float, rule: ScaleRule, **arguments: float) -> None:
        """Keeps the rule.

        Args:
            loss_scale: What the scale starts with.
            rule: How it changes.
            arguments: What the rule was made of, as `repr` shows it.
        """
        self.rule = rule
        self._arguments = arguments
        self.starts = {SCALE: Start(np.float32(loss_scale), stays=not rule.incr_every)}
        if rule.incr_every:
            self.starts |= dict.fromkeys(STEPS, ZERO)
        self.variables = {
            name: Variable(start.value, name=name, trainable=False)
            for name, start in self.starts.items()
        }

    def __repr__(self) -> str:
        """Shows the scale as it is now, and the other arguments.

        It waits for a GPU that decides about steps.
        """
        shown = {"loss_scale": self.get_loss_scale(), **self._arguments}
        return f"<{type(self).__name__} {' '.join(f'{n}={v:g}' for n, v in shown.items())}>"

    def __copy__(self) -> Self:
        """Returns a manager with variables of its own."""
        return copy.deepcopy(self)

    def get_loss_scale(self) -> np.float32:
        """Returns the scale; waits for a GPU that decides about steps."""
        return np.float32(self.variables[SCALE].numpy())

    def update_loss_scale(self, finite_grads: Any) -> None:
        """Counts one step, and changes the scale if it is time.

        Args:
            finite_grads: Whether all gradients of the step are finite.
        """
        if not self.rule.incr_every:
            return
        with writing():
            scale, good, bad = (each.numpy()[()] for each in self.variables.values())
            new = scale_after((scale, int(good), int(bad)), self.rule, bool(finite_grads))
            writes = Undo()  # Ctrl-C between two of them would have the scale change again
            for variable, value in zip(self.variables.values(), new, strict=True):
                writes.assign(variable, np.asarray(value, variable.dtype))
            writes.finish()


class FixedLossScaleManager(RuleManager):
    """A loss scale that stays, as contrib's."""

    def __init__(self, loss_scale: float) -> None:
        """Keeps the scale.

        Args:
            loss_scale: A number from 1 to 2**126; it is rounded to float32.

        Raises:
            TypeError: it is no number.
            ValueError: it is below 1, or above 2**126.
        """
        super().__init__(checked_scale("loss_scale", loss_scale), ScaleRule())


class ExponentialUpdateLossScaleManager(RuleManager):
    """A loss scale that grows after good steps and shrinks after bad ones, as contrib's.

    A good step resets no count of bad ones: they are counted until the scale changes. The scale
    grows to 2**100 at most, where contrib's grows while it is finite, and stays at least 1.
    """

    def __init__(
        self,
        init_loss_scale: float,
        incr_every_n_steps: int,
        decr_every_n_nan_or_inf: int = 2,
        incr_ratio: float = 2,
        decr_ratio: float = 0.8,
    ) -> None:
        """Keeps the rule.

        Args:
            init_loss_scale: A number from 1 to 2**126.
            incr_every_n_steps: After how many good steps, without a bad one, the scale grows.
            decr_every_n_nan_or_inf: After how many bad steps it shrinks.
            incr_ratio: What it is multiplied by when it grows; above 1.
            decr_ratio: What it is multiplied by when it shrinks; between 0 and 1.

        Raises:
            TypeError: an argument is no number, or no whole number.
            ValueError: an argument is out of its range.
        """
        rule = ScaleRule(
            _checked_count("incr_every_n_steps", incr_every_n_steps),
            _checked_ratio("incr_ratio", incr_ratio, 1, np.inf),
            _checked_count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf),
            _checked_ratio("decr_ratio", decr_ratio, 0, 1),
        )
        super().__init__(
            checked_scale("init_loss_scale", init_loss_scale),
            rule,
            incr_every_n_steps=rule.incr_every,
            decr_every_n_nan_or_inf=rule.decr_every,
            incr_ratio=rule.incr_ratio,
            decr_ratio=rule.decr_ratio,
        )


class DynamicLossScale(RuleManager):
    """TensorFlow 2's rule: each bad step divides the scale, and many good ones multiply it.

    The scale grows to 2**100 at most, where TensorFlow's grows while it is finite, and stays at
    least 1.
    """

    def __init__(
        self,
        initial_loss_scale: float = 2.0**15,
        increment_period: int = 2000,
        multiplier: float = 2.0,
    ) -> None:
        """Keeps the rule.

        Args:
            initial_loss_scale: A number from 1 to 2**126.
            increment_period: After how many good steps in a row the scale is multiplied.
            multiplier: By what; and what a bad step divides it by. Above 1.

        Raises:
            TypeError: an argument is no number, or no whole number.
            ValueError: an argument is out of its range.
        """
        factor = _checked_ratio("multiplier", multiplier, 1, np.inf)
        period = _checked_count("increment_period", increment_period)
        rule = ScaleRule(period, factor, divisor=factor)
        scale = checked_scale("initial_loss_scale", initial_loss_scale)
        super().__init__(scale, rule, increment_period=period, multiplier=factor)

    def __call__(self) -> np.float32:
        """Returns the scale; see `get_loss_scale`."""
        return self.get_loss_scale()


def checked_scale(name: str, value: Any) -> float:
    """Returns a loss scale, rounded to float32.

    Raises:
        TypeError: it is no number.
        ValueError: it is below 1, above 2**126, or NaN.
    """
    scale = ignore_fp_warnings(np.float32, checked_number(name, value))
    if not 1 <= scale <= LARGEST_SCALE:
        raise ValueError(
            f"{name} must be at least 1, at most 2**126, and finite in float32, got {value!r}"
        )
    return float(scale)


def _checked_ratio(name: str, value: Any, low: float, high: float) -> float:
    ratio = ignore_fp_warnings(np.float32, checked_number(name, value))
    if not low < ratio < high:
        above = f"above {low}" if high == np.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be {above}, and finite in float32, got {value!r}")
    return float(ratio)


def _checked_count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from error
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    if count >= 2**63:
        raise ValueError(f"{name} must be less than 2**63, got {value!r}")
    return count
