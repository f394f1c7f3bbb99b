"""Moving averages of the values of functions, in place of TensorFlow's averages of tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, ref

import numpy as np

from gpuopt.backends import refuse_masked
from gpuopt.backends.backend import compute_type
from gpuopt.device import device_of
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import new_slot_variable
from gpuopt.training.average_updates import AverageUpdates
from gpuopt.variables.operators import storage_of
from gpuopt.variables.variable import Variable

_logger = logging.getLogger("gpuopt")

# In place of a plain tensor of TensorFlow: computes a new value in each call.
Expression: TypeAlias = "Callable[[], Any]"


class FunctionAverage(NamedTuple):
    """The average of a function's values, which begins at zero.

    Attributes:
        average: What is read.
        biased: What is moved: another variable if the average is corrected for its beginning.
        local_step: How often it was moved, if it is corrected.
    """

    average: Variable
    biased: Variable
    local_step: HostScalar | None


class FunctionAverages:
    """The averages of functions; each goes when its function does."""

    def __init__(self, name: str, zero_debias: bool) -> None:
        """Begins without any.

        Args:
            name: The last part of their names.
            zero_debias: Whether they are corrected for their beginning.
        """
        self._name = name
        self._zero_debias = zero_debias
        self._functions: WeakKeyDictionary[Expression, FunctionAverage] = WeakKeyDictionary()
        # A method is a new object each time it is named, and equal to the one before.
        self._other_expressions: dict[Expression, FunctionAverage] = {}
        # By what they were made of; None where a warning has been given.
        self._last_functions: dict[CodeType, ref[FunctionType] | None] = {}

    def __len__(self) -> int:
        return len(self._functions) + len(self._other_expressions)

    def find(self, expression: Expression) -> FunctionAverage | None:
        """Returns the average of a function's values, if there is one."""
        return self._kind(expression).get(expression)

    def read(self, expression: Expression) -> Any:
        """Calls a function, and returns its value.

        Raises:
            TypeError: the value is masked.
            ValueError: it has another shape than before.
        """
        value, name = expression(), name_of(expression)
        refuse_masked(storage_of(value), f'the value of "{name}"')
        value = value if hasattr(value, "dtype") else np.float32(value)
        found = self.find(expression)
        if found is not None and value.shape != found.average.shape:
            raise ValueError(
                f'"{found.average.name}" has shape {found.average.shape}; the value of '
                f'"{name}" has shape {value.shape}'
            )
        return value

    def find_or_make(self, expression: Expression, value: Any) -> FunctionAverage:
        """Returns the average of a function's values.

        Args:
            expression: The function.
            value: One of them, for the shape and device of a new average, and its type: float32 for
                16 bits.
        """
        found = self.find(expression)
        if found is None:
            average = biased = Variable(
                np.zeros(value.shape, compute_type(value.dtype)),
                name=f"{name_of(expression)}/{self._name}",
                trainable=False,
                device=device_of(value),
            )
            local_step = None
            if self._zero_debias:
                biased = new_slot_variable(average, "biased", 0, 0.0)
                none = compute_type(value.dtype)(0)
                local_step = HostScalar(none, f"{average.name}/local_step", average.device)
                local_step.set_owner(average, None)
            average.is_average = biased.is_average = True
            found = FunctionAverage(average, biased, local_step)
            self._kind(expression)[expression] = found
            if isinstance(expression, FunctionType):
                self._warn_once_of_function_made_again(expression)
        return found

    def _kind(self, expression: Expression) -> MutableMapping[Expression, FunctionAverage]:
        """Returns the table for expressions of this kind."""
        is_function = isinstance(expression, FunctionType)
        return self._functions if is_function else self._other_expressions

    def _warn_once_of_function_made_again(self, function: FunctionType) -> None:
        code = function.__code__
        last = self._last_functions.setdefault(code, ref(function))
        if last is None:
            return
        if last() is not None:
            self._last_functions[code] = ref(function)
            return
        self._last_functions[code] = None
        _logger.warning(
            'the function "%s" (%s, line %d) was made again, and the average of its values '
            "starts again; make it once, before the loop",
            function.__name__,
            code.co_filename,
            code.co_firstlineno,
        )


def correct(
    updates: AverageUpdates, moved: Sequence[FunctionAverage], weight: np.floating[Any]
) -> None:
    """Counts moves, and corrects the averages that are corrected for their beginning.

    Args:
        updates: Those of averages.
        moved: Averages that were just moved.
        weight: The weight that their values had, a float32.
    """
    by_count: dict[np.floating[Any], list[FunctionAverage]] = {}
    for each in moved:
        if each.local_step is not None:
            each.local_step.add(1)
            # What all values so far weigh together, with the digits that TensorFlow has of it.
            count = each.local_step.numpy()[()]
            old = 1 - count.dtype.type(weight)
            by_count.setdefault(1 - old**count, []).append(each)
    for divisor, some in by_count.items():
        averages, biased, _ = zip(*some, strict=True)
        updates.divide(averages, biased, divisor)


def name_of(expression: Expression) -> str:
    """Returns what a function's average is named after."""
    return getattr(expression, "__name__", type(expression).__name__)
