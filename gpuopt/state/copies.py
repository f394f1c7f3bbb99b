"""Copies, pickles and prints optimizers, by the arguments of their constructors and their state."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

from gpuopt.state.state_dict import OptimizerState, owners_of_slots
from gpuopt.variables.copied import Copied, found_again
from gpuopt.variables.gate import between_writes

Self = TypeVar("Self", bound="CopiedByConstructor")
# Of an optimizer, and of each of its groups: the hyperparameters that were set, by name.
Changes = Sequence[Mapping[str, Any]]


class CopiedByConstructor:
    """An optimizer that can be shown, copied and pickled.

    A copy is what the constructor makes of the same arguments, with the hyperparameters that were
    set since, and the state. Copied together with its variables, as in
    `copy.deepcopy({"model": model, "optimizer": optimizer})`, it continues with the copies; copied
    alone, with the variables that have the names of those that had slots. Raw arrays have no names
    outside of their process: they are pickled with their optimizer, or their state is lost.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls: type[Self], *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._arguments = args, kwargs
        return made

    def __repr__(self) -> str:
        """Shows the present hyperparameters, and the constructor's other arguments."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})"

    def __copy__(self: Self) -> Self:
        """Returns an optimizer of the same variables, with slots and averages of its own."""
        cls, (args, kwargs), *rest = self._recipe()
        own = {name: copy.copy(each) for name, each in kwargs.items() if name == "averages"}
        return make_again(cls, (args, {**kwargs, **own}), *rest)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """Returns an optimizer of the copies of its variables; functions are not copied."""
        cls, arguments, changes, state, variables = self._recipe()
        arguments, changes, variables = copy.deepcopy((arguments, changes, variables), memo)
        return make_again(cls, arguments, changes, state, variables)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles the optimizer and the variables that have slots.

        Raises:
            TypeError: an argument is a function that a pickle cannot name, as a lambda.
            ValueError: a view of an array has slots, and the program does not keep the view.
            RuntimeError: called in the middle of a step.
        """
        recipe = cls, arguments, changes, _, _ = self._recipe()
        for name, value in _named_values(cls, *arguments, changes):
            if isinstance(value, FunctionType) and not _can_be_named(value):
                raise TypeError(
                    f"{cls.__name__} cannot be pickled: its {name} is {value!r}, which no other "
                    "process could find by its name; define it in a module, with `def`, or use a "
                    "schedule of gpuopt"
                )
        return make_again, recipe

    def _settings(self) -> dict[str, Any]:
        """Returns what `repr` shows, by the names of the constructor's arguments."""
        args, kwargs = self._arguments
        return dict(_by_name(type(self), args, kwargs))

    def _recipe(self: Self) -> tuple[type[Self], tuple[Any, Any], Changes, Any, dict[str, Any]]:
        """Returns the arguments of `make_again`; the state is a copy already."""
        optimizer: Any = self
        # No other thread changes rows between the two reads.
        with between_writes(f'copying optimizer "{optimizer.get_name()}"'):
            variables = owners_of_slots(optimizer.state)
            state: OptimizerState = optimizer.state_dict(found_again(variables))
        of_wrapper = optimizer.state.wrapper_state
        if of_wrapper is not None:
            # A wrapper's own, which only a copy of the wrapper gets.
            for name in of_wrapper.slot_names:
                state["slots"].pop(name, None)
            for name in of_wrapper.others:
                state["non_slots"].pop(name, None)
        return type(self), self._arguments, self._changes(), state, variables

    def _changes(self) -> Changes:
        """Returns the hyperparameters that were set since the constructor."""
        return []

    def _repeat_changes(self, changes: Changes) -> None:
        """Sets what `_changes` of another optimizer has returned."""

    def _take_state(self, state: Any, variables: Mapping[str, Copied]) -> None:
        """Takes over the state of another optimizer, with copies of the variables it belongs to."""
        optimizer: Any = self
        optimizer.load_state_dict(state, found_again(variables))
        optimizer.state.expect_by_name(variables)


def make_again(
    cls: type[Self],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    changes: Changes,
    state: Any,
    variables: Mapping[str, Any],
) -> Self:
    """Makes a copy by what `CopiedByConstructor._recipe` has returned."""
    args, kwargs = arguments
    made = cls(*args, **kwargs)
    made._repeat_changes(changes)
    made._take_state(state, variables)
    return made


def of_state(value: Any, state: Any) -> Any:
    """Returns a hyperparameter for an optimizer's state: itself, unless it depends on one."""
    return value.for_state(state) if hasattr(value, "for_state") else value


def _by_name(
    cls: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    signature = inspect.signature(cls.__init__)
    bound = signature.bind(None, *args, **kwargs).arguments
    for name, value in list(bound.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        else:
            yield name, value


def _named_values(
    cls: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any], changes: Changes
) -> Iterator[tuple[str, Any]]:
    yield from _by_name(cls, args, kwargs)
    for group in kwargs.get("groups", ()):
        for name, value in group.hyperparameters.items():
            yield f'{name} of group "{group.name}"', value
    for changed in changes:
        yield from changed.items()


def _can_be_named(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function
