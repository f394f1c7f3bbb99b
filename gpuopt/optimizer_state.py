"""An optimizer's state as plain arrays by name, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from gpuopt.slots import check_fits
from gpuopt.variable import Variable, as_variable, global_variables

if TYPE_CHECKING:
    from gpuopt.optimizer import Optimizer

Array = np.ndarray[Any, Any]

_FORMAT = 1


class OptimizerState(TypedDict):
    """What `Optimizer.state_dict` returns.

    Attributes:
        format: 1.
        optimizer: The class's name.
        name: The optimizer's own name.
        hyperparameters: Numbers by name; None where a function gives the number.
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
    optimizer: Optimizer,
    variables: Mapping[str, Any] | None,
    read: Callable[[Variable], Array],
) -> OptimizerState:
    """Reads the state, values that still wait for their slot among it.

    Args:
        optimizer: Whose state.
        variables: As in `Optimizer.state_dict`.
        read: Returns a variable's value in host memory.
    """
    with optimizer._creation:
        names = {variable.identity: name for name, variable in _named(variables).items()}
        slots: dict[str, dict[str, Array]] = {}
        for slot_name in optimizer._slots.in_order_of_creation():
            by_variable = slots.setdefault(slot_name, {})
            for identity, slot in optimizer._slots.table(slot_name).items():
                if identity in names:
                    by_variable[names[identity]] = read(slot)
                elif variables is None:
                    raise ValueError(
                        f'"{identity.name}" is an array without a name of its own, and has a slot '
                        f'"{slot_name}"; name it by variables={{"...": array}}'
                    )
        for (slot_name, variable_name), value in optimizer._slots.waiting.items():
            slots.setdefault(slot_name, {})[variable_name] = value.copy()
        non_slots = {name: read(variable) for name, variable in optimizer._non_slots.items()}
        for name, value in optimizer._waiting_non_slots.items():
            non_slots[name] = value.copy()
        return {
            "format": _FORMAT,
            "optimizer": type(optimizer).__name__,
            "name": optimizer.get_name(),
            "hyperparameters": optimizer._hyperparameters_to_save(),
            "slots": slots,
            "non_slots": non_slots,
        }


def load_state(
    optimizer: Optimizer, state: OptimizerState, variables: Mapping[str, Any] | None
) -> None:
    """Takes over a state; see `Optimizer.load_state_dict`."""
    with optimizer._creation:
        named = _named(variables)
        check_state(optimizer, state, named)
        for slot_name, by_variable in state["slots"].items():
            for name, value in by_variable.items():
                slot = optimizer._slots.get(named[name], slot_name) if name in named else None
                if slot is None:
                    optimizer._slots.waiting[slot_name, name] = np.array(value)
                else:
                    slot.assign(np.asarray(value))
        for name, variable in named.items():
            claim_state(optimizer, name, variable)
        for name, value in state["non_slots"].items():
            existing = optimizer._non_slots.get(name)
            if existing is None:
                optimizer._waiting_non_slots[name] = np.array(value)
            else:
                existing.assign(np.asarray(value))


def claim_state(optimizer: Optimizer, name: str, variable: Variable) -> None:
    """Gives a variable the slots that wait for its name; they are made where they are missing."""
    slots = optimizer._slots
    for slot_name in [slot for slot, owner in slots.waiting if owner == name]:
        value = slots.waiting.pop((slot_name, name))
        existing = slots.get(variable, slot_name)
        if existing is None:
            op_name = optimizer._slot_op_name(slot_name)
            slots.waiting.pop((slot_name, variable.name), None)
            slots.create(variable, slot_name, op_name, value, value.shape, value.dtype)
        else:
            existing.assign(value)


def check_state(
    optimizer: Optimizer, state: OptimizerState, variables: Mapping[str, Variable]
) -> None:
    """Raises TypeError or ValueError unless all of the state fits."""
    _check_form(state)
    described = f'state of {state["optimizer"]} "{state["name"]}"'
    known = optimizer._all_slot_names()
    slot_names = optimizer.get_slot_names() if known is None else known
    for slot_name, by_variable in state["slots"].items():
        if known is not None and slot_name not in known and by_variable:
            raise ValueError(
                f'{described} has a slot "{slot_name}"; {type(optimizer).__name__} '
                f'"{optimizer.get_name()}" has {known}'
            )
        for name, value in by_variable.items():
            what = f'slot "{slot_name}" of "{name}"'
            variable = variables.get(name)
            slot = None if variable is None else optimizer._slots.get(variable, slot_name)
            model = slot if slot is not None else variable if known is not None else None
            if model is not None:
                check_fits(np.asarray(value), what, model.shape, model.dtype)
    saved = {name for by_variable in state["slots"].values() for name in by_variable}
    for name in {*saved, *variables}:
        for slot_name in slot_names:
            has_slot = (
                name in variables and optimizer._slots.get(variables[name], slot_name) is not None
            )
            needed = has_slot or (known is not None and name in saved)
            if needed and name not in state["slots"].get(slot_name, {}):
                raise ValueError(f'{described} has no slot "{slot_name}" of "{name}"')
    others = state["non_slots"]
    needed_others = set(optimizer._non_slots)
    if saved:
        needed_others |= set(optimizer._all_non_slot_names())
    for name in sorted(needed_others - set(others)):
        raise ValueError(f'{described} has no "{name}"')
    for name, existing in optimizer._non_slots.items():
        check_fits(np.asarray(others[name]), f'"{name}"', existing.shape, existing.dtype)


def _check_form(state: OptimizerState) -> None:
    expected = set(OptimizerState.__annotations__)
    if not isinstance(state, Mapping) or set(state) != expected:
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise TypeError(
            f"an optimizer's state is a dictionary with {sorted(expected)}, got {found}"
        )
    if state["format"] != _FORMAT:
        raise ValueError(
            f"the state has format {state['format']!r}; this version of gpuopt reads {_FORMAT}"
        )
    tables = [state["slots"], state["non_slots"]]
    if isinstance(state["slots"], Mapping):
        tables += state["slots"].values()
    for table in tables:
        if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
            raise TypeError(f"an optimizer's state holds values by name, got {table!r}")


def _named(variables: Mapping[str, Any] | None) -> dict[str, Variable]:
    if variables is None:
        return {variable.name: variable for variable in global_variables()}
    return {name: as_variable(variable) for name, variable in variables.items()}
