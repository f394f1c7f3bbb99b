"""Hyperparameters: what they may be, which values are refused, and how they are read and set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from gpuopt.locks import Lock
from gpuopt.optimizers.base.clipping import CLIPPING, checked_clipping
from gpuopt.optimizers.base.declared import Hyperparameter, check_range, declared
from gpuopt.optimizers.base.groups import ParameterGroup
from gpuopt.optimizers.base.names import HyperparameterName
from gpuopt.step.step_numbers import FollowsSteps
from gpuopt.step.user_code import call_user_code
from gpuopt.variables.scalars import as_scalar

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
        group_name: The group's; None for the optimizer's own.
        whose: What errors put before a name.
    """

    def __init__(
        self,
        own: Mapping[str, Hyperparameter],
        check: Callable[[str, Hyperparameter], Hyperparameter],
        settable: Collection[str],
        base: Hyperparameters | None = None,
        group_name: str | None = None,
    ) -> None:
        """Keeps hyperparameters.

        Args:
            own: By name.
            check: Returns a value as it is kept, or raises TypeError or ValueError; it does not
                hold the optimizer, which holds this.
            settable: The names of those that can be set.
            base: The optimizer's, if these are a group's.
            group_name: See the attribute.
        """
        self._check = check
        self.group_name = group_name
        self.whose = "" if group_name is None else f'group "{group_name}": '
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

    def of_group(
        self, group: ParameterGroup, optimizer: type[Any], shared: Collection[str]
    ) -> Hyperparameters:
        """Returns those of a group.

        Args:
            group: What the user gave.
            optimizer: The optimizer's class, for errors.
            shared: The names that a group can set only if it was given a value of its own.

        Raises:
            TypeError, ValueError: it names something else, or a value is refused.
        """
        for name in group.hyperparameters:
            if name not in self._settable:
                is_argument = name in inspect.signature(optimizer).parameters
                problem = "which all variables share" if is_argument else "which does not exist"
                raise TypeError(
                    f'group "{group.name}" has {name}, {problem}; a group of {optimizer.__name__} '
                    f"may have {', '.join(self._settable)}"
                )
        own, whose = group.hyperparameters, f'group "{group.name}": '
        settable = [name for name in self._settable if name in own or name not in shared]
        try:
            return Hyperparameters(own, self._check, settable, self, group.name)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{whose}{error}") from error

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


def checked_hyperparameter(cls: type[Any], name: str, value: Hyperparameter) -> Hyperparameter:
    """Returns a hyperparameter of an optimizer's class, or of a group, as it is kept.

    Raises:
        TypeError, ValueError: it is refused. What a function returns is not known yet.
    """
    if name in CLIPPING:
        return checked_clipping(name, value)
    if name == "learning_rate" and isinstance(value, list | tuple):
        raise TypeError(
            f"learning_rate must be a number, got {type(value).__name__}; variables come with "
            "their gradients, in apply_gradients or update"
        )
    if not callable(value):
        as_scalar(value, name)
        check_range(cls, name, value)
    marked = declared(cls).get(name)
    keeps_all_digits = cls._keeps_all_digits or (marked and marked.keeps_all_digits)
    return with_all_digits(value) if keeps_all_digits else value


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
