"""Saved states with master copies for optimizers without, and the other way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuopt.quietly import quietly
from gpuopt.rules.slot_codes import scales_name
from gpuopt.state.masters import MASTER, Masters, has_master
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

if TYPE_CHECKING:
    from gpuopt.state.state import Description
    from gpuopt.state.state_dict import OptimizerState


def as_kept(
    saved: OptimizerState, optimizer: Description, variables: Mapping[str, Variable]
) -> OptimizerState:
    """Returns a saved state with slots of the types that an optimizer keeps: itself if they are so.

    Args:
        saved: A state of the right form, with slots as the optimizer stores them.
        optimizer: Whether it keeps master copies, and which slots are its own: what wrappers keep
            beside them is of types that do not hang on master copies.
        variables: The variables that exist, by their names in the state.
    """
    masters, codes = optimizer.masters, optimizer.slot_codes
    # Else `in_own_dtype` narrows them: float16 in between would lose large ones.
    follows_variables = masters is None and optimizer.slot_dtype is None
    slots = {name: dict(by_variable) for name, by_variable in saved["slots"].items()}
    hyperparameters = saved["hyperparameters"]
    is_of_masters = isinstance(hyperparameters, Mapping) and hyperparameters.get("masters")
    copies = slots.get(MASTER, {}) if is_of_masters else {}
    if masters is None:
        if not is_of_masters:
            return saved
        slots.pop(MASTER, None)
    else:
        for name, variable in variables.items():
            if not has_master(variable.dtype):
                copies.pop(name, None)
    # Scales are float32 beside variables of every type.
    scales = () if codes is None else [scales_name(name) for name in codes.slots]
    own = slots if optimizer.slot_names is None else optimizer.slot_names
    for slot_name, by_variable in slots.items():
        if slot_name in scales or slot_name not in own:
            continue
        for name, value in by_variable.items():
            array = np.asarray(value)
            if array.dtype not in FLOAT_DTYPES:
                continue
            if masters is not None and has_master(array.dtype):
                by_variable[name] = array.astype(np.float32)
            elif follows_variables and name in copies and name in variables:
                by_variable[name] = quietly(partial(array.astype, variables[name].dtype))
    return {**saved, "slots": slots}


def kept_dtype(dtype: np.dtype[Any], masters: Masters | None) -> np.dtype[Any]:
    """Returns the type of the slots of a variable, given the variable's."""
    return np.dtype(np.float32) if masters is not None and has_master(dtype) else dtype
