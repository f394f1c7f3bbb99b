"""Puts a checkpoint's values in their places, all of them or none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np

from gpuopt.checkpoint.contents import (
    SavedOptimizer,
    find_saved_states,
    tensor_names,
    with_values,
)
from gpuopt.errors import CheckpointError
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizer import Optimizer
from gpuopt.state import loss_scales, state_dict
from gpuopt.state.slot_codecs import has_master, kept_dtype
from gpuopt.state.state import State, check_fits
from gpuopt.state.state_dict import OptimizerState
from gpuopt.variables.undo import Undo
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

Array = np.ndarray[Any, Any]


class Readable(Protocol):
    """An opened checkpoint.

    Attributes:
        path: The file, or the prefix of several.
        names: The names of its tensors.
    """

    @property
    def path(self) -> Path | str: ...

    @property
    def names(self) -> frozenset[str]: ...

    def read(self, names: Iterable[str]) -> Mapping[str, Array]:
        """Returns tensors by name."""


class Restoration(NamedTuple):
    """Values and their places.

    Attributes:
        variables: The variables by their names in the checkpoint.
        values: The variables' values, by the same names.
        places: The variables that take these values, by the same names.
        states: Each optimizer's state.
        waiting: Values whose variables do not exist yet, by name.
        rivals: For each optimizer, by the names of variables in the checkpoint: the states of the
            other optimizers that get the same slots. The first of them to update the variable
            keeps these.
    """

    variables: Mapping[str, Variable]
    values: Mapping[str, Array]
    places: Mapping[str, Variable]
    states: Sequence[tuple[Optimizer, OptimizerState]]
    waiting: dict[str, Array]
    rivals: Sequence[Mapping[str, Sequence[ref[State]]]]

    def write(self, undo: Undo) -> None:
        """Writes all values; called where nobody else writes.

        Afterwards the values must not be used: their memory may hold the replaced ones.

        Args:
            undo: Notes what is replaced.

        Raises:
            ValueError: something does not fit.
        """
        for optimizer, state in self.states:
            state_dict.check_state(optimizer.state, state, self.variables)
        undo.give(self._arrays())
        for (optimizer, state), rivals in zip(self.states, self.rivals, strict=True):
            state_dict.load_state(optimizer.state, state, self.variables, undo, rivals)
            optimizer.state.restored_elsewhere = self._restored_elsewhere(optimizer)
        for name, place in self.places.items():
            undo.assign(place, self.values[name])

    def _arrays(self) -> list[Array]:
        """Lists the values of variables and states."""
        slots = [table for _, state in self.states for table in state["slots"].values()]
        others = [state["non_slots"] for _, state in self.states]
        return [array for each in (self.values, *slots, *others) for array in each.values()]

    def _restored_elsewhere(self, optimizer: Optimizer) -> frozenset[str]:
        """Names the variables whose slots only another optimizer of the same name gets."""
        own: set[str] = set()
        others: set[str] = set()
        for each, state in self.states:
            if each.get_name() == optimizer.get_name():
                (own if each is optimizer else others).update(*state["slots"].values())
        return frozenset(
            self.variables[name].name if name in self.variables else name for name in others - own
        )


def read_values(
    checkpoint: Readable,
    saved: Sequence[SavedOptimizer],
    named: Mapping[str, Variable],
    places: Mapping[str, Variable],
    optimizers: Sequence[Optimizer],
    *,
    deferred: bool,
    strict: bool,
) -> Restoration:
    """Reads a checkpoint's values for these variables and optimizers.

    Each of the variables' names has a place that takes the value. With `deferred`, values without a
    variable wait for it; else they are an error if `strict`.

    Raises:
        CheckpointError: a value is missing, or has no variable.
        ValueError: a shape or a dtype does not fit.
    """
    names = checkpoint.names
    pairs = find_saved_states(optimizers, saved, checkpoint.path)
    own_tensors = {name for entry in saved for name in tensor_names(entry)}
    anew = loss_scales.starts_anew(named, names)
    for name in named:
        if name not in names and name not in anew:
            raise CheckpointError(
                f'{checkpoint.path} holds no "{name}"; it holds {_shortened(names - own_tensors)}. '
                "Saver([...]) says which variables to restore"
            )
    if not strict and not deferred:
        pairs = [(optimizer, _only(entry, named)) for optimizer, entry in pairs]
    claimed = {name for _, entry in pairs for name in tensor_names(entry)}
    extra = names - claimed - set(named)
    if strict and not deferred:
        orphans = [
            variable
            for _, entry in pairs
            for by_variable in entry["slots"].values()
            for variable in by_variable
            if variable not in named
        ]
        extra -= loss_scales.of_loss_scales(names)
        if extra or orphans:
            raise CheckpointError(
                f"{checkpoint.path} holds {_shortened({*extra, *orphans})}, which nothing here is "
                "called; give var_list, or restore with deferred=True before they are made"
            )
    waiting = extra - own_tensors if deferred else set()
    tensors = {**checkpoint.read(sorted({*named, *claimed, *waiting} - set(anew))), **anew}
    values = {name: fitted(name, tensors[name], named[name], places[name]) for name in named}
    states = [(optimizer, with_values(entry, tensors)) for optimizer, entry in pairs]
    waiting_values = {name: tensors[name].copy() for name in waiting}
    return Restoration(named, values, places, states, waiting_values, _rivals(pairs))


def _rivals(
    pairs: Sequence[tuple[Optimizer, SavedOptimizer]],
) -> list[dict[str, list[ref[State]]]]:
    """Returns `Restoration.rivals`: of optimizers that are given the same tensors."""
    states_by_tensor: dict[str, list[State]] = defaultdict(list)
    for optimizer, entry in pairs:
        for by_variable in entry["slots"].values():
            for tensor in by_variable.values():
                states_by_tensor[tensor].append(optimizer.state)
    return [
        {
            variable: [
                ref(each) for each in states_by_tensor[tensor] if each is not optimizer.state
            ]
            for by_variable in entry["slots"].values()
            for variable, tensor in by_variable.items()
            if len(states_by_tensor[tensor]) > 1
        }
        for optimizer, entry in pairs
    ]


def fitted(name: str, value: Array, named: Variable, place: Variable) -> Array:
    """Returns a value of a checkpoint in the type of what it is for.

    The average of a 16-bit variable is float32, and may be saved in 16 bits, as earlier versions
    and TensorFlow keep it, and a `SwappingSaver` saves it: each is restored as the other, and as
    the variable. A whole number, as a global step, may have another type than here that holds it.
    The value goes to `place`: `named`, the variable of its name, or what that is swapped with.

    Raises:
        ValueError: its shape or dtype does not fit.
    """
    if (value.dtype, value.shape) == (place.dtype, place.shape):
        return value
    is_average = place.is_average or named.is_average or name.startswith(f"{place.name}/")
    if is_average and _is_kept_in_either(value.dtype, place.dtype):
        value = ignore_fp_warnings(partial(value.astype, place.dtype))
    elif _is_count(value.dtype, value.shape) and _is_count(place.dtype, place.shape):
        limits = np.iinfo(place.dtype)
        if limits.min <= value <= limits.max:
            value = value.astype(place.dtype)
    check_fits(value, f'"{name}"', place.shape, place.dtype)
    return value


def _is_count(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    return dtype.kind in "iu" and shape == ()


def saved_optimizers(description: Any, names: frozenset[str], path: Path) -> list[SavedOptimizer]:
    """Returns a checkpoint's description of its optimizers, checked.

    Raises:
        CheckpointError: the description is malformed, or names tensors that are not there.
    """
    try:
        saved: list[SavedOptimizer] = description["optimizers"]
        for entry in saved:
            if set(entry) != set(SavedOptimizer.__annotations__):
                raise ValueError(f"an optimizer is described by {sorted(entry)}")
            unknown = set(tensor_names(entry)) - names
            if unknown or not isinstance(entry["name"], str):
                raise ValueError(f"an optimizer needs {_shortened(unknown)}")
        uses = Counter(name for entry in saved for name in tensor_names(entry))
        if twice := [name for name, count in uses.items() if count > 1]:
            raise ValueError(f"{_shortened(twice)} is in several places")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return saved


def _is_kept_in_either(saved: np.dtype[Any], here: np.dtype[Any]) -> bool:
    """Whether one type is that of 16-bit variables, and the other that of their master copies."""
    both = {saved, here}
    return both <= FLOAT_DTYPES and any(
        has_master(each) and both == {each, kept_dtype(each, "float32")} for each in both
    )


def _only(saved: SavedOptimizer, variables: Iterable[str]) -> SavedOptimizer:
    """Leaves out the slots of other variables."""
    kept = {
        slot_name: {name: tensor for name, tensor in by_variable.items() if name in variables}
        for slot_name, by_variable in saved["slots"].items()
    }
    return {**saved, "slots": kept}


def _shortened(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(f'"{name}"' for name in listed[:8])
    return f"{shown} and {len(listed) - 8} more" if len(listed) > 8 else shown or "nothing"
