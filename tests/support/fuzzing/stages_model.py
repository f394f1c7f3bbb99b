"""What steps with many stages should do: plain numpy in float64, and nothing of gpuopt.

The stages are those of a step, in their order: sums of gradients, the loss's scale, what is not
finite, noise, means, clipping, decay, the rule, averages, the powers of beta and the count of
steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fuzzing.model import Rows
from fuzzing.noise_model import noise

MOMENTUM, DECAY, AVERAGE_DECAY, TORCHS_EPSILON = 0.5, 2.0**-5, 0.75, 1e-6
MEAN_DECAY = 0.625
# Of what a sign is of: rounding to 16 bits or fewer, of a slot and of what it is added to.
SIGN_TOLERANCE = 2.0**-5
EETA = 0.25

Gradient = Any  # an array, or Rows


class Settings(NamedTuple):
    """Numbers of a rule, which are exact in float32."""

    beta1: float = 0.875
    beta2: float = 1 - 2**-6
    epsilon: float = 2.0**-8


USUAL = Settings()


class Kind(NamedTuple):
    """One optimizer.

    Attributes:
        slots: What each slot starts with.
        rule: Updates an array in place: (w, g, slots, rate, step size of Adam, settings).
        moves_all_rows: Whether a sparse gradient updates rows that it does not name.
        decay: What a step takes of the array before: a part of it, by the rate.
        rule_of_rows: Updates rows of a sparse gradient, if it is another one.
    """

    slots: Mapping[str, float]
    rule: Callable[..., None]
    moves_all_rows: bool = False
    decay: Callable[[float], float] = lambda rate: 0.0
    rule_of_rows: Callable[..., None] | None = None


def _gradient_descent(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    w -= rate * g


def _momentum(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    slots["momentum"][...] = MOMENTUM * slots["momentum"] + g
    w -= rate * slots["momentum"]


def _adagrad(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    slots["accumulator"] += g * g
    w -= rate * g / np.sqrt(slots["accumulator"])


def _rms_prop(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    slots["rms"] += (1 - at.beta1) * (g * g - slots["rms"])
    slots["momentum"][...] = MOMENTUM * slots["momentum"] + rate * g / np.sqrt(
        slots["rms"] + at.epsilon
    )
    w -= slots["momentum"]


def _adam(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    slots["m"] += (1 - at.beta1) * (g - slots["m"])
    slots["v"] += (1 - at.beta2) * (g * g - slots["v"])
    w -= size * slots["m"] / (np.sqrt(slots["v"]) + at.epsilon)


def _lion(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    w -= rate * np.sign(at.beta1 * slots["m"] + (1 - at.beta1) * g)
    slots["m"] += (1 - at.beta2) * (g - slots["m"])


def _lars(w: Any, g: Any, slots: Any, rate: float, size: float, at: Settings) -> None:
    norm, of_gradient = np.sqrt(np.sum(w * w)), np.sqrt(np.sum(g * g))
    if norm > 0 and of_gradient > 0:
        rate = rate * EETA * norm / (of_gradient + DECAY * norm + at.epsilon)
    _momentum(w, rate * (g + DECAY * w), slots, 1.0, size, at)


_MOMENTS = {"m": 0.0, "v": 0.0}
KINDS = {
    "GradientDescent": Kind({}, _gradient_descent),
    "Momentum": Kind({"momentum": 0.0}, _momentum),
    "Adagrad": Kind({"accumulator": 0.25}, _adagrad),
    "RMSProp": Kind({"rms": 1.0, "momentum": 0.0}, _rms_prop),
    "Adam": Kind(_MOMENTS, _adam, moves_all_rows=True),
    "LazyAdam": Kind(_MOMENTS, _adam),
    "AdamW": Kind(_MOMENTS, _adam, moves_all_rows=True, decay=lambda rate: DECAY),
    "LARS": Kind({"momentum": 0.0}, _lars, rule_of_rows=_momentum),
    "Lion": Kind({"m": 0.0}, _lion, decay=lambda rate: rate * DECAY),
}


class Clip(NamedTuple):
    """How the gradients of some arrays are clipped; by TensorFlow's, torch's or Apex's formula."""

    norm: float = np.inf
    value: float = np.inf
    form: str = "tensorflow"

    def factor(self, norm: float) -> float:
        if np.isinf(self.norm):
            return 1.0
        if self.form == "torch":
            return min(self.norm / (norm + TORCHS_EPSILON), 1.0)
        return min(1.0, self.norm / norm) if norm else 1.0


class Scaling:
    """The scale of a loss, which is fixed, or follows TensorFlow 2's rule or contrib's."""

    every, start = 2, 8.0

    def __init__(self, kind: str) -> None:
        self.kind, self.scale, self.good, self.bad, self.skipped = kind, self.start, 0, 0, 0

    def note(self, is_finite: bool) -> None:
        self.skipped += not is_finite
        if self.kind == "fixed":
            return
        self.good = self.good + 1 if is_finite else 0
        self.bad += not is_finite
        if self.good == self.every:
            # A GPU would flush the reciprocal of a larger one.
            self.scale, self.good, self.bad = min(2 * self.scale, 2.0**100), 0, 0
        if self.bad == {"dynamic": 1, "exponential": 2}[self.kind]:
            self.scale, self.bad = max(1.0, self.scale / 2), 0


class Model:
    """All numbers of a program, of arrays by their labels.

    Attributes:
        kind: The optimizer's.
        values: The arrays, or their master copies.
        slots: Of the arrays that had a gradient.
        averages: Of the arrays that were updated, if they are followed.
        pending: The gradients that are accumulated: one mapping for each call.
        settings: Of the rule.
        powers: Those of beta, as float32.
        count: Of updates.
        noise: Of the options that add noise to gradients, the one that is given.
        smooths: Whether means take the place of gradients before these are clipped.
        norm: Of the gradients of the last update that are not clipped by their group.
        largest: The largest number that an array had before some update, by the array's name:
            "w", "m of w" or "average of w". Where numbers cancel, rounding is in proportion to it.
        turned: How far the elements of an array may be off, as rounding may turn a sign.
    """

    def __init__(
        self,
        kind: str,
        values: Mapping[str, np.ndarray],
        settings: Settings = USUAL,
        *,
        smooths: bool = False,
    ) -> None:
        own = KINDS[kind]
        self.kind = own._replace(slots={**own.slots, "mean": 0.0}) if smooths else own
        self.smooths = smooths
        self.values = dict(values)
        self.slots: dict[str, dict[str, np.ndarray]] = {}
        self.averages: dict[str, np.ndarray] = {}
        self.pending: list[dict[str, Gradient]] = []
        self.settings = settings
        self.powers = [np.float32(each) for each in settings[:2]]
        self.count, self.norm = 0, 0.0
        self.largest: dict[str, float] = {}
        self.turned: dict[str, np.ndarray] = {}
        self.scaling: Scaling | None = None
        self.noise: str | None = None

    def accumulate(self, gradients: Mapping[str, Gradient]) -> None:
        self.pending.append(dict(gradients))

    def take(self, *, is_mean: bool) -> dict[str, Gradient]:
        """Returns the sums, or means, of what was accumulated, and forgets it."""
        calls, self.pending = self.pending, []
        divisor = len(calls) if is_mean else 1
        sums: dict[str, Gradient] = {}
        for label in dict.fromkeys(label for call in calls for label in call):
            given = [call[label] for call in calls if label in call]
            if all(isinstance(each, Rows) for each in given):
                values = np.concatenate([each.values for each in given]) / divisor
                sums[label] = Rows(values, np.concatenate([each.indices for each in given]))
            else:
                shape = self.values[label].shape
                sums[label] = sum(as_dense(each, shape) for each in given) / divisor
        return sums

    def update(
        self,
        gradients: Mapping[str, Gradient],
        rates: Mapping[str, float],
        clips: Mapping[str, tuple[int, Clip]],
        follows: str | None,
        epsilons: Mapping[str, float] = MappingProxyType({}),
        *,
        may_skip: bool,
        makes_slots: bool,
    ) -> bool:
        """Makes one update by unscaled gradients.

        Args:
            gradients: By label.
            rates: The learning rates.
            clips: Each array's clipping, with the number of those that are clipped together.
            follows: "inside" and "after" for averages that begin after and before the first step.
            epsilons: Of arrays with their own.
            may_skip: Whether a gradient that is not finite leaves the update out.
            makes_slots: Whether also an update that is left out makes slots.

        Returns:
            Whether it is made.
        """
        shapes = {label: self.values[label].shape for label in gradients}
        summed = {label: as_dense(each, shapes[label]) for label, each in gradients.items()}
        # Only what is given counts: an infinite value beside a row's NaN, too.
        given = [each.values if isinstance(each, Rows) else each for each in gradients.values()]
        is_finite = all(np.isfinite(each).all() for each in given)
        makes_step = is_finite or not may_skip
        if self.scaling is not None:
            self.scaling.note(is_finite)
        if makes_step or makes_slots:
            for label, shape in shapes.items():
                self.slots.setdefault(
                    label, {name: np.full(shape, at) for name, at in self.kind.slots.items()}
                )
        if follows == "after" and (makes_step or makes_slots):
            for label in gradients:
                self.averages.setdefault(label, self.values[label].copy())
        if not makes_step:
            return False
        norms = {
            number: float(
                np.sqrt(sum(np.sum(summed[n] ** 2) for n in gradients if clips[n][0] == number))
            )
            for number, _ in clips.values()
        }
        self.norm = norms.get(0, 0.0)
        for label, gradient in gradients.items():
            number, clip = clips[label]
            given = summed[label] + self._noise_of("unscaled_noise", label, gradient)
            given = self._mean_of(label, gradient, given) if self.smooths else given
            clipped = np.clip(given, -clip.value, clip.value) * clip.factor(norms[number])
            clipped = clipped + self._noise_of("gradient_noise", label, gradient)
            self._note_largest(label)
            self._note_cancelled(label, summed[label], clipped)
            at = self.settings._replace(epsilon=epsilons.get(label, self.settings.epsilon))
            self._update(label, clipped, getattr(gradient, "indices", None), rates[label], at)
        for label in gradients if follows else ():
            value = self.values[label]
            average = self.averages.setdefault(label, value.copy())
            average -= (1 - AVERAGE_DECAY) * (average - value)
        self.powers = [
            np.float32(p * np.float32(b))
            for p, b in zip(self.powers, self.settings[:2], strict=True)
        ]
        self.count += 1
        return True

    def _update(
        self, label: str, gradient: np.ndarray, rows: Any, rate: float, at: Settings
    ) -> None:
        power1, power2 = (float(power) for power in self.powers)
        size = rate * np.sqrt(1 - power2) / (1 - power1)
        w, slots = self.values[label], self.slots[label]
        named: Any = ... if rows is None else np.unique(rows).astype(int)
        w[named] -= self.kind.decay(rate) * w[named]
        touched: Any = ... if self.kind.moves_all_rows else named
        parts = {name: slot[touched] for name, slot in slots.items()}
        part = w[touched]
        rule = self.kind.rule if rows is None else self.kind.rule_of_rows or self.kind.rule
        if rule is _lion:
            self._note_turned(label, touched, gradient[touched], parts["m"], rate, at)
        rule(part, gradient[touched], parts, rate, size, at)
        w[touched] = part
        for name, slot in slots.items():
            slot[touched] = parts[name]

    def _mean_of(self, label: str, gradient: Gradient, given: np.ndarray) -> np.ndarray:
        """Returns the means of gradients so far, once this one counts in the rows that it names."""
        named: Any = ... if not isinstance(gradient, Rows) else np.unique(gradient.indices)
        mean, smoothed = self.slots[label]["mean"], np.zeros(given.shape)
        mean[named] = MEAN_DECAY * mean[named] + (1 - MEAN_DECAY) * given[named]
        smoothed[named] = mean[named] / (1 - MEAN_DECAY ** (self.count + 1))
        return smoothed

    def _noise_of(self, option: str, label: str, gradient: Gradient) -> Any:
        """Returns what an option adds to the rows that a gradient names."""
        if self.noise != option:
            return 0.0
        named: Any = ... if not isinstance(gradient, Rows) else np.unique(gradient.indices)
        added = np.zeros(self.values[label].shape)
        added[named] = noise(self.count, added.shape, label)[named]
        return added

    def _note_largest(self, label: str) -> None:
        arrays = {f"{name} of {label}": slot for name, slot in self.slots[label].items()}
        arrays[label] = self.values[label]
        if label in self.averages:
            arrays[f"average of {label}"] = self.averages[label]
        for name, array in arrays.items():
            now = float(np.abs(array).max(initial=0))
            self.largest[name] = max(self.largest.get(name, 0.0), now)

    def _note_cancelled(self, label: str, given: np.ndarray, final: np.ndarray) -> None:
        """Notes what a gradient's stages computed with, where their sum is smaller."""
        if not (self.smooths or self.noise):
            return
        added = np.abs(final - given).max(initial=0)
        largest = float(max(np.abs(given).max(initial=0), added))
        of_squares = largest * float(np.abs(final).max(initial=0))
        for slot in self.slots[label]:
            name = f"{slot} of {label}"
            noted = of_squares if slot in ("v", "rms", "accumulator") else largest
            self.largest[name] = max(self.largest.get(name, 0.0), noted)

    def _note_turned(
        self, label: str, touched: Any, gradient: Any, mean: Any, rate: float, at: Settings
    ) -> None:
        """Notes elements whose step is along a sum that nearly cancels."""
        parts = at.beta1 * mean, (1 - at.beta1) * gradient
        is_near = np.abs(sum(parts)) <= SIGN_TOLERANCE * sum(map(np.abs, parts))
        turned = self.turned.setdefault(label, np.zeros(self.values[label].shape))
        turned[touched] += 2 * rate * is_near

    def copied(self) -> Model:
        return copy.deepcopy(self)


def as_dense(gradient: Gradient, shape: Sequence[int]) -> np.ndarray:
    """Returns the sum of a sparse gradient's rows, as an array of all; a dense one as it is."""
    if not isinstance(gradient, Rows):
        return np.array(gradient)
    dense = np.zeros(tuple(shape))
    np.add.at(dense, gradient.indices, gradient.values)
    return dense
