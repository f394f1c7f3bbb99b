"""The types of slots, and saved states with slots of another type than an optimizer keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpuopt.quietly import quietly
from gpuopt.state.master_conversion import kept_dtype
from gpuopt.state.masters import Masters
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

if TYPE_CHECKING:
    from gpuopt.state.state import Description
    from gpuopt.state.state_dict import OptimizerState

SlotDtype = Literal["bfloat16", "float32"]

# Of what a state says about itself.
SLOT_DTYPE = "slot_dtype"


def name_of_dtype(given: Any) -> Any:
    """Returns the name of a type, as `np.float32` or `np.dtype("float32")`; all else as it is."""
    if not isinstance(given, type | np.dtype):  # an array or a number has a type, and is none
        return given
    try:
        return np.dtype(given).name
    except (TypeError, ValueError):  # it names none
        return given


def dtype_of_slots(
    dtype: np.dtype[Any], masters: Masters | None, slot_dtype: np.dtype[Any] | None
) -> np.dtype[Any]:
    """Returns the type of the slots of a variable, given the variable's."""
    return kept_dtype(dtype, masters) if slot_dtype is None else slot_dtype


def check_no_doubles(variables: Sequence[Variable], slot_dtype: np.dtype[Any]) -> None:
    """Raises TypeError for variables that would lose most digits of their slots."""
    for variable in variables:
        if variable.dtype == np.float64:
            raise TypeError(
                f'slot_dtype="{slot_dtype}": "{variable.name}" is float64, and its slots would '
                "lose most of their digits: use float32, or an optimizer without slot_dtype for it"
            )


def in_own_dtype(
    saved: OptimizerState, optimizer: Description, variables: Mapping[str, Variable]
) -> OptimizerState:
    """Returns a saved state with slots of the type that an optimizer keeps: itself if they are so.

    Args:
        saved: A state of the right form.
        optimizer: The one that gets it.
        variables: The variables that exist, by their names in the state. Of others, slots that were
            in a type of their own become float32.
    """
    hyperparameters = saved["hyperparameters"]
    is_own = isinstance(hyperparameters, Mapping) and hyperparameters.get(SLOT_DTYPE)
    if optimizer.slot_codes is not None or (optimizer.slot_dtype is None and not is_own):
        return saved
    slots = {name: dict(by_variable) for name, by_variable in saved["slots"].items()}
    for slot_name in optimizer.slot_names or ():
        for name, value in slots.get(slot_name, {}).items():
            array = np.asarray(value)
            # Those of a float64 variable are refused.
            if array.dtype not in FLOAT_DTYPES or array.dtype == np.float64:
                continue
            given = variables[name].dtype if name in variables else np.dtype(np.float32)
            own = dtype_of_slots(given, optimizer.masters, optimizer.slot_dtype)
            slots[slot_name][name] = quietly(partial(array.astype, own))
    return {**saved, "slots": slots}
