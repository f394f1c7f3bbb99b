"""Hyperparameters: what they may be, which values are refused, and how they are read and set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, SupportsFloat, TypedDict

import numpy as np

from gpuopt.locks import Lock
from gpuopt.step.step_numbers import FollowsSteps
from gpuopt.step.user_code import call_user_code
from gpuopt.variables.scalars import as_scalar

# A number, something with a scalar value, or a function without arguments that returns one and is
# called in each step.
Hyperparameter = SupportsFloat | Callable[[], SupportsFloat]

# Of gpuopt's optimizers. Type checkers know these alone.
HyperparameterName = Literal[
    "learning_rate",
    "beta1",
    "beta2",
    "epsilon",
    "epsilon_root",
    "rho",
    "momentum",
    "dampening",
    "weight_decay",
    "alpha",
    "beta",
    "base",
    "decay",
    "momentum_decay",
    "eeta",
    "learning_rate_decay",
    "learning_rate_power",
    "l1",
    "l2",
    "l1_regularization_strength",
    "l2_regularization_strength",
    "l2_shrinkage_regularization_strength",
    "clip_norm",
    "clip_value",
]


class OfGroup(TypedDict, total=False):
    """The hyperparameters that a group may have."""

    learning_rate: Hyperparameter
    beta1: Hyperparameter
    beta2: Hyperparameter
    epsilon: Hyperparameter
    epsilon_root: Hyperparameter
    rho: Hyperparameter
    momentum: Hyperparameter
    dampening: Hyperparameter
    weight_decay: Hyperparameter
    alpha: Hyperparameter
    beta: Hyperparameter
    base: Hyperparameter
    decay: Hyperparameter
    momentum_decay: Hyperparameter
    eeta: Hyperparameter
    learning_rate_decay: Hyperparameter
    learning_rate_power: Hyperparameter
    l1: Hyperparameter
    l2: Hyperparameter
    l1_regularization_strength: Hyperparameter
    l2_regularization_strength: Hyperparameter
    l2_shrinkage_regularization_strength: Hyperparameter
    clip_norm: Hyperparameter | None
    clip_value: Hyperparameter | None


# Types of hyperparameters whose value cannot change.
_NUMBER_TYPES = (float, int, np.float32, np.float64)

# Two threads may set two hyperparameters of one optimizer: neither may be lost.
_setting = Lock("the setting of hyperparameters")


class Hyperparameters(Mapping[HyperparameterName, Any]):
    """The hyperparameters of an optimizer, or of one of its groups, by name.

    To set one, assign to its name: from the next step on, it has the new value. A group has the
    optimizer's where it has none of its own.

    Attributes:
        own: Those that are not the optimizer's, as they were given.
        fixed: Their values, if none can change until one is set; else empty.
        changing: Those of `own` that are no numbers, and may have another value in each step.
        changed: Those that were set, as they were given.
        whose: What errors put before a name.
    """

    def __init__(
        self,
        own: Mapping[str, Hyperparameter],
        check: Callable[[str, Hyperparameter], Hyperparameter],
        settable: Collection[str],
        base: Hyperparameters | None = None,
        whose: str = "",
    ) -> None:
        """Keeps hyperparameters.

        Args:
            own: By name.
            check: Returns a value as it is kept, or raises TypeError or ValueError; it does not
                hold the optimizer, which holds this.
            settable: The names of those that can be set.
            base: The optimizer's, if these are a group's.
            whose: See the attribute.
        """
        self._check = check
        self.whose = whose
        self._settable = settable
        self._base = base
        self.changed: Mapping[str, Hyperparameter] = {}
        self._keep({name: check(name, value) for name, value in own.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_settable", ()):
            raise AttributeError(
                f'hyperparameters are set by name: hyperparameters["{name}"] = ...',
                name=name,
                obj=self,
            )
        object.__setattr__(self, name, value)

    # Any, because whoever reads one knows whether it is a number: `rates["learning_rate"] *= 0.5`.
    def __getitem__(self, name: HyperparameterName) -> Any:
        try:
            return self.own[name] if self._base is None or name in self.own else self._base[name]
        except KeyError:
            raise KeyError(f"there is no {name!r}; there are {', '.join(self)}") from None

    def __setitem__(self, name: HyperparameterName, value: Hyperparameter) -> None:
        """Sets a hyperparameter.

        Raises:
            KeyError: there is none of this name, or it cannot be set.
            TypeError, ValueError: the value is refused.
        """
        if name not in self._settable:
            raise KeyError(f"{name!r} cannot be set; these can: {', '.join(self._settable)}")
        checked = self._check(name, value)
        with _setting:
            self._keep({**self.own, name: checked})
            self.changed = {**self.changed, name: value}

    def __iter__(self) -> Iterator[HyperparameterName]:
        names: Iterator[Any] = iter(self.own if self._base is None else self._base)
        return names

    def __len__(self) -> int:
        return len(self.own if self._base is None else self._base)

    def __repr__(self) -> str:
        return repr(dict(self))

    def evaluate(self) -> Mapping[str, np.floating[Any]]:
        """Returns the values that its own have in this step: functions are called."""
        if self.fixed:
            return self.fixed
        numbers = self._numbers
        return {
            name: numbers[name]
            if name in numbers
            else as_scalar(_value_now(value), f"{self.whose}{name}")
            for name, value in self.own.items()
        }

    def to_save(self) -> dict[str, float | None]:
        """Returns its own as a checkpoint mentions them: None for a function."""
        return {name: None if callable(value) else float(value) for name, value in self.own.items()}

    def _keep(self, own: Mapping[str, Hyperparameter]) -> None:
        # In an order in which a step of another thread takes the old values, or the new ones.
        numbers = {
            name: as_scalar(value, name)
            for name, value in own.items()
            if type(value) in _NUMBER_TYPES
        }
        self.fixed: Mapping[str, np.floating[Any]] = {}
        self._numbers: Mapping[str, np.floating[Any]] = {}
        self.own = own
        self.changing: Mapping[str, Any] = {
            name: each for name, each in own.items() if name not in numbers
        }
        self._numbers = numbers
        if len(numbers) == len(own):
            self.fixed = numbers


def with_all_digits(value: Hyperparameter) -> Hyperparameter:
    """Has `as_scalar` keep all digits of a Python float, also of one that a function returns."""
    if callable(value):
        return value if isinstance(value, WithAllDigits) else WithAllDigits(value)
    return np.float64(value) if type(value) is float else value


class WithAllDigits:
    """A function of `with_all_digits`.

    Attributes:
        given: The function that it calls.
    """

    def __init__(self, given: Callable[[], Any]) -> None:
        self.given = given

    def __call__(self) -> Any:
        return with_all_digits(self.given())


def _value_now(value: Any) -> Any:
    if not callable(value):
        return value
    given = value.given if isinstance(value, WithAllDigits) else value
    is_ours = isinstance(given, FollowsSteps) and given._is_ours
    return value() if is_ours else call_user_code(value)


def require_number(**numbers: SupportsFloat) -> None:
    """Refuses what is no number, and functions: what a slot starts with is no hyperparameter.

    Raises:
        TypeError: a value is no real number.
        ValueError: it is an array of numbers.
    """
    for name, value in numbers.items():
        if callable(value):
            raise TypeError(f"{name} must be a number, got {value!r}")
        as_scalar(value, name)


def require_positive(**hyperparameters: Any) -> None:
    """Refuses the values that TensorFlow refuses, NaN, and what is no number.

    Raises:
        TypeError: a value is no real number.
        ValueError: a number is not above 0.
    """
    require_number(**hyperparameters)
    for name, value in hyperparameters.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive: {value}")


def require_not_negative(**hyperparameters: Any) -> None:
    """Refuses the values that TensorFlow refuses, and NaN; functions are not called.

    Raises:
        ValueError: a number is not 0 or above.
    """
    for name, value in hyperparameters.items():
        if not callable(value) and not value >= 0:
            raise ValueError(f"{name} {value} needs to be positive or zero")
