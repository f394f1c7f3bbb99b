"""Closed forms of many steps without a gradient, for rows that catch up.

In a step without a gradient, Adam's `m` and `v` are multiplied by beta1 and beta2, and the row
moves by `a * m / (sqrt(v) + epsilon)`. With r = beta1 / sqrt(beta2), u_k = beta2^(-k/2) - 1,
d = sqrt(v) + epsilon and y = epsilon / d, step k after the row's last one moves it by

    a_k beta1^k m / (beta2^(k/2) sqrt(v) + epsilon) = m / d * a_k r^k / (1 + y u_k)

The sums over k of `a_k r^k u_k^j` depend on steps alone, and not on the row. Those for j = 0, 1
and 2 give the movement. What the series leaves out is at most `y^3` times the sum of
`|a_k| r^k u_k^3`, whatever the step sizes are, if `y` and `u_k` are not negative. Where this is too
much, as where `v` is about 0, the steps are made one by one, until r^k is nothing. So they are
where epsilon is below 0, or beta2 above 1.

Sums are kept for rows whose last step was a multiple of `STRIDE`. From those of a row follow those
of a row that has missed one step more, before these, of the size a: with the first one's u, since
u_(k+1) = (1 + u) u_k + u,

    F0' = r (a + F0)
    F1' = r ((1 + u) F1 + u (a + F0))
    F2' = r ((1 + u) ((1 + u) F2 + u F1) + u ((1 + u) F1 + u (a + F0)))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuopt.rules.update_rule import UpdateRule

# The option: whether rows without a gradient catch up later, by sums (True) or step by step.
CatchUpOption = bool | Literal["stepping"]

# The sums of a step: of j = 0, 1 and 2, and of the bound.
NUM_SUMS = 4
# Sums are kept for every fourth step. Mirrors `sums_stride` in kernels/shared/catch_up.cuh.
STRIDE = 4
# Steps are left out of sums once r^k is below this.
_NOTHING = {np.float32: 1e-14, np.float64: 1e-21}
# The part of a row's movement that may be left out: about as much as rounding, or less.
_TOLERANCE = {np.float32: 2.5e-7, np.float64: 5e-8}
# With a longer window, rows do not fall behind: sums would have too many terms.
_LONGEST_WINDOW = 4096
# Bounds of the number of steps that can be counted: after these, all rows are brought up to date
# and counting begins anew.
_LONGEST = 16 * 1024
_SHORTEST = 1024


class OneEarlier(NamedTuple):
    """Makes the sums of a step from those of the next one, and this one's step size.

    Mirrors `OneEarlier` in kernels/shared/catch_up.cuh.

    Attributes:
        ratio: r.
        excess: u of one step.
        bound: The factor of the step's size in the bound.
    """

    ratio: np.float64
    excess: np.float64
    bound: np.float64

    def sums(self, later: Sequence[Any], step_size: Any) -> list[Any]:
        """Returns the sums of a step.

        Args:
            later: Those of the next one.
            step_size: Of the next one.
        """
        first, second, third, bound = later
        ratio, excess, growth = self.ratio, self.excess, 1 + self.excess
        first = step_size + first
        third = growth * third + excess * second
        second = growth * second + excess * first
        return [
            ratio * first,
            ratio * second,
            ratio * (growth * third + excess * second),
            abs(ratio) * (bound + abs(step_size) * self.bound),
        ]


class Factors:
    """The numbers by which rows are brought up to date, as long as a rule's scalars stay.

    Attributes:
        key: Equal for equal numbers.
        decays: Of each slot of the rule, in order, in float64.
        scalars: The rule's, of the step that these were made in.
        weights: float64 [window, 4]: what a step size of 1 adds to the sums of the steps before,
            the oldest one first. None if rows do not move. The bound is that of a row whose last
            step was up to `STRIDE` - 1 steps before.
        one_earlier: How sums follow from those of one step later; None if rows do not move.
        window: How many steps without a gradient move a row; 0 if rows do not move.
        tolerance: The part of a movement that may be left out; -1 if all steps are made one by one.
        fall_behind: Whether rows may: not where steps would count for too long.
    """

    def __init__(
        self,
        rule: UpdateRule,
        scalars: Mapping[str, np.floating[Any]],
        real: type[np.float32] | type[np.float64],
        *,
        stepping: bool,
    ) -> None:
        """Computes the numbers.

        Args:
            rule: A rule that declares its effect on rows without a gradient.
            scalars: The rule's.
            real: Their type.
            stepping: Whether all steps are to be made one by one.
        """
        unnamed = rule.unnamed
        assert unnamed is not None, "an optimizer without it refuses the option"
        self.key = key_of(rule, scalars)
        self.scalars = dict(scalars)
        decay_of = {slot: float(scalars[name]) for slot, name in unnamed.decays.items()}
        self.decays = tuple(decay_of.get(slot, 1.0) for slot in rule.slots)
        self.tolerance = _TOLERANCE[real]
        self.weights: np.ndarray[Any, Any] | None = None
        self.one_earlier: OneEarlier | None = None
        self.window = 0
        self.fall_behind = all(map(math.isfinite, self.decays))
        movement = unnamed.movement
        if movement is None or not self.fall_behind:
            return
        average, square = decay_of[movement.average], decay_of[movement.square]
        # The bound holds where neither `y` nor any `u_k` is negative.
        if stepping or scalars[movement.epsilon] < 0 or square > 1:
            self.tolerance = -1.0
        ratio = average / math.sqrt(square) if square > 0 else math.inf
        self.window = _window(abs(ratio), _NOTHING[real])
        self.fall_behind = self.window <= _LONGEST_WINDOW
        if self.fall_behind:
            self.weights = _weights(ratio, square, self.window)
            self.one_earlier = _one_earlier(ratio, square)

    def room_for(self, height: int) -> int:
        """Returns how many steps there should be room for, beside a table of so many rows.

        In a short table it is cheap to bring all rows up to date.
        """
        rows = 1 << max(height - 1, 0).bit_length()
        return min(max(rows, _SHORTEST, 2 * self.window), _LONGEST)


def key_of(rule: UpdateRule, scalars: Mapping[str, np.floating[Any]]) -> tuple[float, ...]:
    """Returns the scalars that `Factors` depend on: all but the step size."""
    return tuple([float(scalars[name]) for name in _names_of_factors(rule)])


def may_be_missed(rule: UpdateRule, scalars: Mapping[str, np.floating[Any]]) -> bool:
    """Returns whether rows may miss a step that has these scalars.

    Not if a step size is infinite or NaN: a row moves by it, however long ago it was named.
    """
    steady = _names_of_factors(rule)
    return all(name in steady or math.isfinite(scalars[name]) for name in rule.scalars)


def _names_of_factors(rule: UpdateRule) -> list[str]:
    unnamed = rule.unnamed
    assert unnamed is not None
    names = [*unnamed.decays.values()]
    if unnamed.movement is not None:
        names.append(unnamed.movement.epsilon)
    return names


def _window(ratio: float, nothing: float) -> int:
    """Returns the first k with ratio^k < `nothing`; more than the longest window if there is none.

    NaN has none.
    """
    if ratio == 0:
        return 1
    if not ratio < 1:
        return _LONGEST_WINDOW + 1
    return min(math.ceil(math.log(nothing) / math.log(ratio)), _LONGEST_WINDOW + 1)


def _weights(ratio: float, square: float, window: int) -> np.ndarray[Any, Any]:
    k = np.arange(window, 0, -1, dtype=np.float64)
    # Too large ones become infinite: then the bound is, too.
    with np.errstate(all="ignore"):
        powers, growth = ratio**k, np.expm1(-0.5 * math.log(square) * k)
        of_earlier = np.expm1(-0.5 * math.log(square) * (k + (STRIDE - 1)))
        sums = [powers, powers * growth, powers * growth**2, abs(powers) * of_earlier**3]
        return np.stack(sums, axis=1)


def _one_earlier(ratio: float, square: float) -> OneEarlier:
    with np.errstate(all="ignore"):
        excess, bound = np.expm1(-0.5 * math.log(square) * np.array([1, STRIDE - 1]))
        return OneEarlier(np.float64(ratio), excess, bound**3)
