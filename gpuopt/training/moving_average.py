"""Moving averages of variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.array_operators import storage_of
from gpuopt.backends import backend_for, moved
from gpuopt.backends.backend import compute_type
from gpuopt.device import Device, device_of
from gpuopt.identity import Identity, unique_name
from gpuopt.slots import new_slot_variable
from gpuopt.variable import (
    FLOAT_DTYPES,
    Variable,
    as_variable,
    global_variables,
    trainable_variables,
)

# Stands for TensorFlow's plain tensor: something that is computed anew at each step.
Expression: TypeAlias = "Callable[[], Any]"


class _ExpressionAverage(NamedTuple):
    average: Variable
    biased: Variable | None
    local_step: Variable | None


class ExponentialMovingAverage:
    """Keeps an exponentially decaying average of each variable, for evaluation.

        average -= (1 - decay) * (average - value)

    The average of a variable is a "shadow" variable beside it, named `<variable>/<name>`, that
    starts at the variable's value. A function without arguments stands for what TensorFlow calls a
    plain tensor: it is evaluated by each `apply`, and its average starts at zero.
    """

    def __init__(
        self,
        decay: float,
        num_updates: Any = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        """Keeps the settings.

        Args:
            decay: What remains of the average after an `apply`, slightly below 1.
            num_updates: How often training has run, a number or a scalar variable, read by each
                `apply`: the decay is then at most `(1 + num_updates) / (10 + num_updates)`, so
                that averages follow faster at the beginning.
            zero_debias: Correct averages of functions for their start at zero (Kingma & Ba 2015,
                section 3). Variables' averages do not start at zero and need no correction.
            name: What shadow variables are named after.
        """
        self._decay = decay
        self._num_updates = num_updates
        self._zero_debias = zero_debias
        self._name = name
        self._averages: WeakKeyDictionary[Identity, Variable] = WeakKeyDictionary()
        self._expressions: dict[Expression, _ExpressionAverage] = {}

    @property
    def name(self) -> str:
        return self._name

    def apply(self, var_list: Iterable[Any] | None = None) -> None:
        """Moves the averages towards the present values; call it after the training step.

        Args:
            var_list: Variables, arrays, or functions without arguments that return an array; by
                default `trainable_variables()`. Shadow variables are made at the first call.

        Raises:
            TypeError: something is not floating point; nothing is changed then.
        """
        tracked = trainable_variables() if var_list is None else list(var_list)
        values = [self._checked_value(source) for source in tracked]
        decay = np.float32(self._decay)
        if self._num_updates is not None:
            updates = np.float32(moved(storage_of(self._num_updates), Device.cpu))
            decay = min(decay, (1 + updates) / (10 + updates))
        for source, value in zip(tracked, values, strict=True):
            weight = compute_type(value.dtype)(1 - decay)
            if callable(source):
                _move_expression(self._expression_average(source, value), value, weight)
            else:
                _move(self._shadow(as_variable(source)), value, weight)

    def track(self, var_list: Iterable[Any] | None = None) -> None:
        """Makes the averages that are missing, with the present values, and moves none.

        Args:
            var_list: See `apply`, which makes them otherwise, with what training left by then.
        """
        for source in trainable_variables() if var_list is None else list(var_list):
            value = self._checked_value(source)
            if callable(source):
                self._expression_average(source, value)
            else:
                self._shadow(as_variable(source))

    def average(self, var: Any) -> Variable | None:
        """Returns the variable that holds the average of `var`, or None before `apply`."""
        if callable(var):
            found = self._expressions.get(var)
            return None if found is None else found.average
        return self._averages.get(as_variable(var).identity)

    def average_name(self, var: Any) -> str:
        """Returns the name of the average of `var`, or the name that it would get."""
        average = self.average(var)
        if average is not None:
            return average.name
        name = _expression_name(var) if callable(var) else as_variable(var).name
        return unique_name(f"{name}/{self._name}")

    def variables_to_restore(
        self, moving_avg_variables: Iterable[Variable] | None = None
    ) -> dict[str, Variable]:
        """Maps names in a checkpoint to variables, so that averages are loaded as weights.

        Args:
            moving_avg_variables: What to load from averages; by default trainable variables, and
                those that have an average.

        Returns:
            The average's name to the variable for these, and its own name for every other variable.
        """
        everything = global_variables()
        if moving_avg_variables is None:
            averaged = [v for v in everything if v.trainable or v.identity in self._averages]
        else:
            averaged = list(moving_avg_variables)
        names = {self.average_name(variable): variable for variable in averaged}
        skipped = {variable.name for variable in averaged} | set(names)
        names.update((v.name, v) for v in everything if v.name not in skipped)
        return names

    def _checked_value(self, source: Any) -> Any:
        if callable(source):
            value = source()
            value = value.storage if isinstance(value, Variable) else value
            name = _expression_name(source)
            value = value if hasattr(value, "dtype") else np.float32(value)
        else:
            variable = as_variable(source)
            value, name = variable.storage, variable.name
        if value.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f'The variables must be half, float, or double: "{name}" has dtype {value.dtype}'
            )
        return value

    def _shadow(self, variable: Variable) -> Variable:
        shadow = self._averages.get(variable.identity)
        if shadow is None:
            shadow = new_slot_variable(variable, self._name, variable.storage)
            self._averages[variable.identity] = shadow
        return shadow

    def _expression_average(self, expression: Expression, value: Any) -> _ExpressionAverage:
        found = self._expressions.get(expression)
        if found is None:
            average = Variable(
                np.zeros(value.shape, value.dtype),
                name=f"{_expression_name(expression)}/{self._name}",
                trainable=False,
                device=device_of(value),
            )
            biased = local_step = None
            if self._zero_debias:
                biased = new_slot_variable(average, "biased", 0)
                counting = np.dtype(compute_type(value.dtype))
                local_step = new_slot_variable(average, "local_step", 0, shape=(), dtype=counting)
            found = self._expressions[expression] = _ExpressionAverage(average, biased, local_step)
        return found


def _expression_name(expression: Expression) -> str:
    return getattr(expression, "__name__", type(expression).__name__)


def _move(average: Variable, value: Any, weight: np.floating[Any]) -> None:
    with backend_for(average.device).active(average.identity):
        average.assign_sub((average.storage - moved(value, average.device)) * weight)


def _move_expression(state: _ExpressionAverage, value: Any, weight: np.floating[Any]) -> None:
    average, biased, local_step = state
    if biased is None or local_step is None:
        _move(average, value, weight)
        return
    _move(biased, value, weight)
    local_step.assign_add(1)
    with backend_for(average.device).active(average.identity):
        average.assign(biased.storage / (1 - (1 - weight) ** local_step.storage))
