"""An optimizer's state as plain arrays by name, and back."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, TypedDict
from weakref import WeakValueDictionary

import numpy as np

from gpuopt.backends import refuse_masked
from gpuopt.backends.cpu.memory import WrittenMemory
from gpuopt.rules.update_rule import row_shape
from gpuopt.state import loss_scales
from gpuopt.state.accumulated import hint_about, is_zero_count
from gpuopt.state.counts import assign_counts
from gpuopt.state.slot_codecs import MASTER, converted_slots
from gpuopt.state.slots import replace_arrays
from gpuopt.state.state import Description, Range, State, check_fits
from gpuopt.variables.copied import Copied, array_of, to_copy
from gpuopt.variables.identity import Identity
from gpuopt.variables.storage import describe, holds_numbers
from gpuopt.variables.undo import Undo
from gpuopt.variables.unfinished import refuse_unfinished
from gpuopt.variables.variable import (
    Variable,
    as_variable,
    global_variables,
    require_known_owner,
)

Array = np.ndarray[Any, Any]

_FORMAT = 1


class OptimizerState(TypedDict):
    """The result of `Optimizer.state_dict`.

    Attributes:
        format: 1.
        optimizer: The class's name.
        name: The optimizer's own name.
        hyperparameters: Numbers by name; None where a function gives the number, and for infinity
            and NaN, which JSON does not have: so where nothing is clipped.
        slots: Slot name to variable's name to value, in order of creation.
        non_slots: The optimizer's other variables by name, as "beta1_power".
    """

    format: int
    optimizer: str
    name: str
    hyperparameters: dict[str, Any]
    slots: dict[str, dict[str, Array]]
    non_slots: dict[str, Array]


def read_state(
    state: State,
    variables: Mapping[str, Any] | None,
    read: Callable[[Variable], Array],
    by_path: bool = True,
) -> OptimizerState:
    """Reads a state, including restored values that still wait for their slot.

    Args:
        state: An optimizer's state.
        variables: As in `Optimizer.state_dict`.
        read: Returns a variable's value in host memory.
        by_path: Whether arrays have the names of their paths; else all names of all optimizers'
            variables differ.

    Raises:
        RuntimeError: a step was not finished.
    """
    state.settle_expected()
    of_wrapper = state.wrapper_state
    with state.lock, nullcontext() if of_wrapper is None else of_wrapper.lay_out():
        # Kept, so that other threads cannot drop a variable meanwhile.
        named = _named(state, variables, by_path)
        with_slots = [variable for variable in named.values() if state.slots_of(variable)]
        touched = [each.identity for each in (*state.variables(), *with_slots)]
        refuse_unfinished("saved", touched, state)
        names = {variable.identity: name for name, variable in named.items()}
        slots: dict[str, dict[str, Array]] = {}
        for slot_name in _in_order(state, state.slot_names()):
            by_variable = slots.setdefault(slot_name, {})
            for identity, slot in state.table(slot_name).items():
                if of_wrapper is not None and of_wrapper.is_stale(slot_name, identity):
                    continue
                if identity in names:
                    by_variable[names[identity]] = read(slot)
                # Of one that another thread is dropping: not listed any more, its slots go next.
                elif variables is None and identity.holder() is not None:
                    raise ValueError(
                        f'"{identity.name}" is an array without a name of its own, and has a slot '
                        f'"{slot_name}" in "{state.describe().name}"; name it in a mapping, as in '
                        'state_dict({"w": array}) or Saver({"w": array}, optimizers=[...])'
                    )
        contested = {each.name: names.get(each, each.name) for each in state.contested}
        of_arrays = {name: path for path, name in state.names_of_paths.items()}
        waiting_names = {
            **(of_arrays if by_path else {}),
            **{each.name: name for name, each in named.items() if each.name in of_arrays},
            **contested,
        }
        for (slot_name, variable_name), value in state.waiting_slots.items():
            by_variable = slots.setdefault(slot_name, {})
            name = waiting_names.get(variable_name, variable_name)
            # A Variable of the same optimizer may have the path as its name.
            by_variable[variable_name if name in by_variable else name] = value.copy()
        non_slots = {name: read(variable) for name, variable in state.others().items()}
        for name, value in state.waiting_others.items():
            non_slots[name] = value.copy()
        described = state.describe()
        if described.slot_names is not None:
            _leave_out_half_made(slots, described.slot_names)
        if not any(slots.values()) and _own_others(state).isdisjoint(non_slots):
            slots.clear()  # as before the first step; a refused one has left the names
        return {
            "format": _FORMAT,
            "optimizer": described.optimizer,
            "name": described.name,
            "hyperparameters": _as_json_has_them(described.hyperparameters),
            "slots": slots,
            "non_slots": non_slots,
        }


def _as_json_has_them(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters, also those of groups, with None for NaN and infinity."""
    return {
        name: _as_json_has_them(value)
        if isinstance(value, Mapping)
        else (None if isinstance(value, float) and not math.isfinite(value) else value)
        for name, value in hyperparameters.items()
    }


def owners_of_slots(state: State, more: Iterable[Identity] = ()) -> dict[str, Copied]:
    """Returns what has slots, or slots that wait, and `more`; see `to_copy`."""
    with state.lock:
        owners = {each for name in state.slot_names() for each in state.table(name)} | {*more}
        owners |= {each for each in state.contested if not state.is_taken_elsewhere(each)}
        found = {name: to_copy(identity) for identity, name in _names_of(owners).items()}
        return {name: each for name, each in found.items() if each is not None}


def _leave_out_half_made(slots: dict[str, dict[str, Array]], slot_names: list[str]) -> None:
    """Leaves out the variables that lack some of their slots.

    Ctrl-C, or a fork in another thread's step, has come between the making of the one and the
    other. No update has used them.
    """
    tables = [slots.get(slot_name, {}) for slot_name in slot_names]
    masters = slots.get(MASTER, {})
    for name in {name for table in [*tables, masters] for name in table}:
        if not all(name in table for table in tables):
            for table in [*tables, masters]:
                table.pop(name, None)


def load_state(
    state: State,
    saved: OptimizerState,
    variables: Mapping[str, Any] | None,
    undo: Undo,
    rivals: Mapping[str, Sequence[weakref.ref[State]]] = MappingProxyType({}),
) -> None:
    """Takes over a saved state; see `Optimizer.load_state_dict`.

    Args:
        state: Of the optimizer.
        saved: The state that it takes over.
        variables: As in `Optimizer.load_state_dict`.
        undo: Notes all replaced values.
        rivals: See `State.rivals`; by the names of `saved`.
    """
    state.settle_expected()
    with state.lock:
        named = _named(state, variables)
        check_state(state, saved, named)
        saved = _out_of_slots(state, _in_own_codecs(state, saved, named))
        state.keep(undo)
        state.forget_lost()
        state.wait_for_paths()
        state.restored_elsewhere = frozenset()
        state.rivals = rivals
        state.contested.clear()
        names = {name for by_variable in saved["slots"].values() for name in by_variable}
        found = {name: named[name].identity for name in names & named.keys()}
        state.loaded = WeakValueDictionary(found)
        if state.wrapper_state is not None:
            state.wrapper_state.forget_all()
        if _is_of_no_step(state, saved, named):
            _go_back_before_all_steps(state, named, undo)
        counting = state.describe().counting
        counts: dict[Variable, dict[str, Any]] = {}
        for slot_name in _in_order(state, saved["slots"]):
            for name, value in saved["slots"][slot_name].items():
                slot = state.slot(named[name], slot_name) if name in named else None
                is_new = slot is None and (name not in named or name in rivals)
                if counting is not None and slot_name in counting.own_counts and not is_new:
                    counts.setdefault(named[name], {})[slot_name] = value
                    continue
                if slot is None:
                    state.waiting_slots[slot_name, name] = np.array(value)
                elif slot.shape != np.shape(value):
                    arrays = [(slot_name, np.asarray(value))]
                    replace_arrays(state, named[name], arrays, state.describe().slot_codecs)
                else:
                    undo.assign(slot, np.asarray(value))
        if counts:
            assign_counts(state, counts, counting)
        for name, variable in named.items():
            claim_state(state, name, variable, undo)
        state.wait_for_names()
        described = state.describe()
        for name in described.names_of_groups:
            if name not in saved["non_slots"]:
                state.drop_other(name)
        for name, value in saved["non_slots"].items():
            if _is_left_out(name, value, state, described):
                continue
            existing = state.other(name)
            if existing is None:
                state.waiting_others[name] = np.array(value)
            else:
                undo.assign(existing, np.asarray(value))


def _in_own_codecs(
    state: State, saved: OptimizerState, variables: Mapping[str, Variable]
) -> OptimizerState:
    """Returns a saved state with slots as the optimizer stores them."""
    optimizer = state.describe()
    codecs, own_names = optimizer.slot_codecs, optimizer.slot_names
    given = saved["slots"], saved["hyperparameters"]
    slots = converted_slots(*given, codecs, own_names, variables)
    if optimizer.counting is not None:
        _add_counts(slots, saved["non_slots"], optimizer, variables)
    return {**saved, "slots": slots}


def _add_counts(
    slots: dict[str, dict[str, Any]],
    numbers: Mapping[str, Any],
    optimizer: Description,
    variables: Mapping[str, Variable],
) -> None:
    """Adds counts of each variable to the slots of a state that has one for all."""
    counting = optimizer.counting
    starts: Mapping[str, np.generic] = counting.own_counts
    own = [name for name in optimizer.slot_names or () if name not in starts]
    names = dict.fromkeys(name for slot_name in own for name in slots.get(slot_name, ()))
    for name in names:
        if any(name in slots.get(slot_name, ()) for slot_name in starts):
            continue
        found = counting._counts_of_all(numbers, name, variables.get(name))
        for slot_name, value in found.items():
            _checked_numbers(value, f'"{slot_name}"', optimizer.ranges.get(slot_name))
            number = np.array(type(starts[slot_name])(value))
            slots.setdefault(slot_name, {})[name] = number


def _out_of_slots(state: State, saved: OptimizerState) -> OptimizerState:
    """Copies those values that lie in the memory of slots, which the load overwrites."""
    memory = WrittenMemory([v._array for v in state.variables() if v.memory.kind == "cpu"])

    def copied(values: Mapping[str, Any]) -> dict[str, Array]:
        arrays = {name: np.asarray(value) for name, value in values.items()}
        return {
            name: array.copy() if memory.overlaps(array) else array
            for name, array in arrays.items()
        }

    slots = {slot_name: copied(values) for slot_name, values in saved["slots"].items()}
    return {**saved, "slots": slots, "non_slots": copied(saved["non_slots"])}


def check_claim(state: State, name: str, variable: Variable) -> None:
    """Raises ValueError unless the slots that wait for a name fit the variable that is to come."""
    known = state.describe().slot_names or []
    for slot_name, value in _waiting_slots(state, name).items():
        _check_slot(state, variable, slot_name, name, value, slot_name in known)


def claim_state(state: State, name: str, variable: Variable, undo: Undo) -> None:
    """Gives a variable the slots that wait for its name; they are made where they are missing.

    `check_claim` comes first, and `State.keep`.
    """
    op_name, counting = state.describe().op_name, state.describe().counting
    counts: dict[str, Any] = {}
    for slot_name, value in _waiting_slots(state, name).items():
        del state.waiting_slots[slot_name, name]
        existing = state.slot(variable, slot_name)
        if existing is None and name in state.rivals:
            # Made by the first of several optimizers to update the variable.
            state.waiting_slots[slot_name, variable.name] = value
            state.contested[variable.identity] = state.rivals[name]
            continue
        if counting is not None and slot_name in counting.own_counts:
            state.waiting_slots.pop((slot_name, variable.name), None)
            counts[slot_name] = value
        elif existing is None:
            state.waiting_slots.pop((slot_name, variable.name), None)
            is_master = slot_name == MASTER and state.describe().slot_codecs.masters is not None
            if is_master:  # which the variable will follow
                undo.keep(variable)
                undo.set(variable.identity, "master_pair", variable.identity.master_pair)
            slot = state.create_slot(
                variable, slot_name, op_name(slot_name), value, value.shape, value.dtype
            )
            if is_master:
                slot.overwrite(value)
        else:
            undo.assign(existing, value)
    if counts:
        assign_counts(state, {variable: counts}, counting)


def check_form(state: OptimizerState) -> None:
    """Raises TypeError or ValueError unless a state has the parts of an `OptimizerState`."""
    expected = set(OptimizerState.__annotations__)
    if not isinstance(state, Mapping) or set(state) != expected:
        found = sorted(state, key=str) if isinstance(state, Mapping) else type(state).__name__
        raise TypeError(
            f"an optimizer's state is a dictionary with {sorted(expected)}, got {found}"
        )
    if np.ndim(state["format"]) or state["format"] != _FORMAT:
        raise ValueError(
            f"the state has format {state['format']!r}; this version of gpuopt reads {_FORMAT}"
        )
    tables = [state["slots"], state["non_slots"]]
    if isinstance(state["slots"], Mapping):
        tables += state["slots"].values()
    for table in tables:
        if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
            raise TypeError(f"an optimizer's state holds values by name, got {table!r}")


def check_state(state: State, saved: OptimizerState, variables: Mapping[str, Variable]) -> None:
    """Raises TypeError or ValueError unless all of a saved state fits, and what waits already."""
    check_form(saved)
    saved = _in_own_codecs(state, saved, variables)
    what_is_saved = f'state of {saved["optimizer"]} "{saved["name"]}"'
    _check_slots(state, saved, variables, what_is_saved)
    _check_others(state, saved, variables, what_is_saved)


def _check_slots(
    state: State, saved: OptimizerState, variables: Mapping[str, Variable], what_is_saved: str
) -> None:
    optimizer = state.describe()
    known = optimizer.slot_names or []
    of_wrapper = _slots_of_wrapper(state)
    models: dict[str, Array] = {}
    # Slots of rows last: their shape follows from the others'.
    names = sorted(saved["slots"], key=optimizer.row_slots.__contains__)
    for slot_name, by_variable in ((each, saved["slots"][each]) for each in names):
        if slot_name in of_wrapper:
            continue
        is_ours = slot_name in known or (slot_name == MASTER and optimizer.slot_codecs.masters)
        if not is_ours and optimizer.lists_all and by_variable:
            raise ValueError(
                f'{what_is_saved} has a slot "{slot_name}"; {optimizer.optimizer} '
                f'"{optimizer.name}" has {known}{hint_about(slot_name)}'
            )
        for name, value in by_variable.items():
            what = f'slot "{slot_name}" of "{name}"'
            array = _checked_numbers(value, what, optimizer.ranges.get(slot_name))
            if name in variables:
                _check_slot(state, variables[name], slot_name, name, array, slot_name in known)
            elif (dtype_of_count := _dtype_of_count(optimizer, slot_name)) is not None:
                check_fits(array, what, (), dtype_of_count)
            elif slot_name in known:
                model = models.setdefault(name, array)
                shape, dtype = model.shape, model.dtype
                if model is not array:
                    shape, dtype = _expected(optimizer, slot_name, shape, dtype, array)
                check_fits(array, what, shape, dtype)
    _check_wrapper_state(state, saved, variables)
    for (slot_name, name), value in state.waiting_slots.items():
        is_replaced = name in saved["slots"].get(slot_name, ()) or slot_name in of_wrapper
        if name in variables and not is_replaced:
            _check_slot(state, variables[name], slot_name, name, value, slot_name in known)
    has_slots = {
        name
        for slot_name, by_variable in saved["slots"].items()
        if slot_name not in of_wrapper
        for name in by_variable
    }
    if _is_of_no_step(state, saved, variables):
        return
    for name in {*has_slots, *variables}:
        there = {
            slot_name
            for slot_name in state.slot_names()
            if name in variables and state.slot(variables[name], slot_name) is not None
        }.difference(of_wrapper)
        if not there.issuperset(known):  # half made: no state has them
            there.difference_update(known)
        for slot_name in dict.fromkeys([*known, *state.slot_names()]):
            is_needed = slot_name in there or (slot_name in known and name in has_slots)
            # Without a saved one, a master copy follows its variable.
            if is_needed and slot_name != MASTER and name not in saved["slots"].get(slot_name, {}):
                raise ValueError(f'{what_is_saved} has no slot "{slot_name}" of "{name}"')


def _is_of_no_step(state: State, saved: OptimizerState, variables: Mapping[str, Variable]) -> bool:
    """Whether a state is of before an optimizer's first step, and covers all that has slots here.

    One that is found by TensorFlow's names lists the slots that are missing.
    """
    if saved["slots"] or not _own_others(state).isdisjoint(saved["non_slots"]):
        return False
    covered = {variable.identity for variable in variables.values()}
    return all(covered.issuperset(state.table(name)) for name in _own_slot_names(state))


def _go_back_before_all_steps(state: State, variables: Mapping[str, Variable], undo: Undo) -> None:
    """Drops slots and powers, made or waiting: the next step makes them anew."""
    for slot_name in _own_slot_names(state):
        for slot in state.table(slot_name).values():
            undo.keep(slot)  # a master copy is written with its variable
        state.drop_slots(slot_name)
        for name in variables:
            state.waiting_slots.pop((slot_name, name), None)
    for other in _own_others(state):
        state.drop_other(other)


def _own_slot_names(state: State) -> list[str]:
    """Lists the names of the slots without those that a wrapper keeps."""
    of_wrapper = _slots_of_wrapper(state)
    return [name for name in state.slot_names() if name not in of_wrapper]


def _own_others(state: State) -> set[str]:
    """Names the optimizer's own variables that its first step makes."""
    return set(state.describe().other_names).difference(loss_scales.NAMES)


def _slots_of_wrapper(state: State) -> Sequence[str]:
    return () if state.wrapper_state is None else state.wrapper_state.slot_names


def _check_wrapper_state(
    state: State, saved: OptimizerState, variables: Mapping[str, Variable]
) -> None:
    """Raises TypeError or ValueError unless what a wrapper has kept fits the variables."""
    if state.wrapper_state is None:
        return
    arrays: dict[str, dict[str, Array]] = {}
    for slot_name in state.wrapper_state.slot_names:
        for name, value in saved["slots"].get(slot_name, {}).items():
            array = _checked_numbers(value, f'slot "{slot_name}" of "{name}"', None)
            arrays.setdefault(name, {})[slot_name] = array
    for name, slots in arrays.items():
        if name in variables:
            require_known_owner(variables[name])
            state.wrapper_state.check(slots, variables[name], name)


def _check_others(
    state: State, saved: OptimizerState, variables: Mapping[str, Variable], what_is_saved: str
) -> None:
    optimizer = state.describe()
    others = saved["non_slots"]
    for name, value in others.items():
        allowed = optimizer.ranges.get(name)
        array = _checked_numbers(value, f'"{name}"', allowed)
        if _is_left_out(name, array, state, optimizer):
            continue
        is_listed = name in optimizer.other_names or name in optimizer.names_of_groups
        if not is_listed and optimizer.lists_all:
            raise ValueError(
                f'{what_is_saved} has a "{name}"; {optimizer.optimizer} "{optimizer.name}" has '
                f"{optimizer.other_names or 'nothing but slots'}{hint_about(name)}"
            )
        existing = state.other(name)
        if existing is not None:
            check_fits(array, f'"{name}"', existing.shape, existing.dtype)
        elif allowed is not None:
            check_fits(array, f'"{name}"', (), np.dtype(allowed.dtype))
    needed = set(state.others()).difference(optimizer.names_of_groups)
    of_wrapper = _slots_of_wrapper(state)
    if [
        slot_name
        for slot_name, each in saved["slots"].items()
        if each and slot_name not in of_wrapper
    ]:
        needed |= set(optimizer.other_names)
    if _is_of_no_step(state, saved, variables):
        needed -= _own_others(state)
    for name in sorted(needed - set(others)):
        raise ValueError(f'{what_is_saved} has no "{name}"')


def _is_left_out(name: str, value: Any, state: State, optimizer: Description) -> bool:
    """Whether one of an optimizer's other variables may be saved, and is not restored."""
    is_of_a_loss_scale = name in loss_scales.NAMES and optimizer.lists_all
    if is_of_a_loss_scale and name not in optimizer.other_names and state.other(name) is None:
        return True
    is_idle = state.wrapper_state is None and optimizer.lists_all and is_zero_count(name, value)
    is_left_out = name.partition("/")[0] in optimizer.names_left_out
    return is_idle or is_left_out or _is_of_another_grouping(name, optimizer)


def _is_of_another_grouping(name: str, optimizer: Description) -> bool:
    """Whether one of an optimizer's other variables is of a group that it does not have here."""
    return (
        name not in optimizer.names_of_groups
        and name not in optimizer.other_names
        and name.partition("/")[0] in optimizer.other_names
    )


def _checked_numbers(value: Any, what: str, allowed: Range | None) -> Array:
    """Returns a saved value as an array of numbers.

    Raises:
        TypeError: it does not hold numbers.
        ValueError: a number is one that the optimizer cannot have made.
    """
    refuse_masked(value, what)
    array = np.asarray(value)
    if not holds_numbers(array):
        raise TypeError(f"the saved value of {what} must hold numbers, got {describe(value)}")
    if allowed is not None:
        is_right = (array >= allowed.low) & (array <= allowed.high)
        if allowed.high == np.inf:
            is_right |= np.isnan(array)
        if not is_right.all():
            raise ValueError(
                f"{what} holds numbers from {allowed.low:.9g} to {allowed.high:.9g}; the saved "
                f"value has {array[~is_right].flat[0]:.9g}"
            )
    return array


def _check_slot(
    state: State, variable: Variable, slot_name: str, name: str, value: Array, is_known: bool
) -> None:
    """Raises ValueError unless a value fits a variable's slot, which may still be missing.

    If it `is_known`, it is of the variable's dtype, and of its shape or `row_shape`.
    """
    require_known_owner(variable)
    slot = state.slot(variable, slot_name)
    what = f'slot "{slot_name}" of "{name}"'
    described = state.describe()
    if slot is not None and not (is_known and described.slot_codecs.coded):
        check_fits(value, what, slot.shape, slot.dtype)
    elif is_known:
        shape, dtype = variable.shape, variable.dtype
        check_fits(value, what, *_expected(described, slot_name, shape, dtype, value))
    elif slot_name == MASTER and described.slot_codecs.masters:
        check_fits(value, what, variable.shape, np.dtype(np.float32))


def _expected(
    optimizer: Description,
    slot_name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    value: Array,
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns the shape and dtype of a slot that the optimizer lists, given its variable's."""
    if (dtype_of_count := _dtype_of_count(optimizer, slot_name)) is not None:
        return (), dtype_of_count
    shape = row_shape(shape) if slot_name in optimizer.row_slots else shape
    codecs = optimizer.slot_codecs
    form = codecs.form(slot_name, shape, dtype, by_rows=value.ndim == 2)
    return form.shape, form.dtype


def _dtype_of_count(optimizer: Description, slot_name: str) -> np.dtype[Any] | None:
    """Returns the dtype of a slot that counts a variable's steps; None for any other slot."""
    starts = {} if optimizer.counting is None else optimizer.counting.own_counts
    return np.dtype(type(starts[slot_name])) if slot_name in starts else None


def _in_order(state: State, slot_names: Iterable[str]) -> list[str]:
    """Sorts the names of slots as the optimizer makes them: a checkpoint numbers the slots so."""
    given, known = list(slot_names), state.describe().slot_names or []
    return [*(name for name in known if name in given), *(n for n in given if n not in known)]


def _waiting_slots(state: State, name: str) -> dict[str, Array]:
    """Returns the values that wait for the slots of a variable, by the slots' names."""
    return {
        slot_name: value
        for (slot_name, owner), value in state.waiting_slots.items()
        if owner == name
    }


def arrays_with_paths(state: State) -> list[Variable]:
    """Returns the arrays of trees that have slots here.

    After a load, a copy or a pickle, `global_variables` lists them from the first `update` on.
    """
    owners = {each for slot_name in state.slot_names() for each in state.table(slot_name)}
    arrays = [array_of(each) for each in owners if each.path is not None]
    return [as_variable(each) for each in arrays if each is not None]


def _named(
    state: State, variables: Mapping[str, Any] | None, by_path: bool = True
) -> dict[str, Variable]:
    if variables is None:
        named = {each.name: each for each in (*arrays_with_paths(state), *global_variables())}
        return _with_paths(state, named) if by_path else named
    if not isinstance(variables, Mapping):
        raise TypeError(
            "variables must be a mapping of the state's names to variables or arrays, as in "
            f'{{"w": array}}, got {describe(variables)}'
        )
    named = {name: as_variable(variable) for name, variable in variables.items()}
    refuse_two_names(named)
    return named


def _with_paths(state: State, named: dict[str, Variable]) -> dict[str, Variable]:
    """Names arrays of a state's trees by their paths, which others' arrays may have as names.

    Arrays of trees without slots are left out: slots wait for the path, to which another may come.
    """
    own = [variable for variable in named.values() if state.slots_of(variable)]
    names = _names_of([variable.identity for variable in own])
    others = {
        name: variable
        for name, variable in named.items()
        if variable.identity not in names and variable.identity.path is None
    }
    return {**others, **{names[variable.identity]: variable for variable in own}}


def _names_of(owners: Iterable[Identity]) -> dict[Identity, str]:
    """Names the variables of a state: arrays by their paths, as far as these are different."""
    names = {identity.name: identity for identity in owners}
    # By length: the name of one array, as "b_1" of "b", may be the path of another.
    for name, identity in sorted(names.items(), key=lambda item: len(item[0])):
        if identity.path is not None and identity.path not in names:
            names[identity.path] = names.pop(name)
    return {identity: name for name, identity in names.items()}


def refuse_two_names(named: Mapping[str, Variable]) -> None:
    """Raises ValueError if a variable has two names: its state could be read by one alone."""
    names: dict[Identity, str] = {}
    for name, variable in named.items():
        other = names.setdefault(variable.identity, name)
        if other != name:
            raise ValueError(f'one variable is named "{other}" and "{name}"; give it one name')
