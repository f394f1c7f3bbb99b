"""TensorFlow's names for the tensors of a checkpoint: variables, slots, optimizers' others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from gpuopt.errors import CheckpointError
from gpuopt.optimizer import Optimizer
from gpuopt.state.state_dict import OptimizerState

Array = np.ndarray[Any, Any]


class SavedOptimizer(TypedDict):
    """An `OptimizerState` with the tensors' names in the place of their values."""

    format: int
    optimizer: str
    name: str
    hyperparameters: dict[str, Any]
    slots: dict[str, dict[str, str]]
    non_slots: dict[str, str]


def flattened(
    variables: Mapping[str, Array], states: Sequence[tuple[Optimizer, OptimizerState]]
) -> tuple[dict[str, Array], list[SavedOptimizer]]:
    """Names all tensors as TensorFlow does.

    The slots of "w" under Adam are "w/Adam" and "w/Adam_1", in order of creation, and a second
    Adam's "w/Adam_2" and "w/Adam_3"; its powers of beta are "beta1_power_1" and "beta2_power_1".

    Args:
        variables: Values by name.
        states: Each optimizer with its state, in order of creation.

    Returns:
        Tensors by name, and for each optimizer the names of its tensors.
    """
    tensors = dict(variables)
    saved: list[SavedOptimizer] = []
    taken: Counter[str] = Counter()

    def add(name: str, value: Array) -> str:
        # No recursion: a function that refers to itself would keep all values until the next
        # garbage collection.
        while True:
            number = taken[name]
            taken[name] += 1
            unique = f"{name}_{number}" if number else name
            if unique not in tensors:
                tensors[unique] = value
                return unique

    for optimizer, state in states:
        op_name = optimizer.state.describe().op_name
        slots = {
            slot_name: {
                variable: add(f"{variable}/{op_name(slot_name)}", value)
                for variable, value in by_variable.items()
            }
            for slot_name, by_variable in state["slots"].items()
        }
        non_slots = {name: add(name, value) for name, value in state["non_slots"].items()}
        saved.append({**state, "slots": slots, "non_slots": non_slots})
    return tensors, saved


def tensor_names(saved: SavedOptimizer) -> list[str]:
    """Lists the names of an optimizer's tensors."""
    slots = [name for by_variable in saved["slots"].values() for name in by_variable.values()]
    return [*slots, *saved["non_slots"].values()]


def with_values(saved: SavedOptimizer, tensors: Mapping[str, Array]) -> OptimizerState:
    """Returns an optimizer's state, with the tensors in place of their names."""
    return {
        **saved,
        "slots": {
            slot_name: {variable: tensors[name] for variable, name in by_variable.items()}
            for slot_name, by_variable in saved["slots"].items()
        },
        "non_slots": {key: tensors[name] for key, name in saved["non_slots"].items()},
    }


def find_saved_states(
    optimizers: Sequence[Optimizer], saved: Sequence[SavedOptimizer], path: Path | str
) -> list[tuple[Optimizer, SavedOptimizer]]:
    """Finds each optimizer's saved state by the optimizer's name; those of one name, by order.

    Raises:
        CheckpointError: the checkpoint has more or fewer optimizers of a name than there are here.
    """
    pairs: list[tuple[Optimizer, SavedOptimizer]] = []
    for name in dict.fromkeys(optimizer.get_name() for optimizer in optimizers):
        mine = [optimizer for optimizer in optimizers if optimizer.get_name() == name]
        theirs = [entry for entry in saved if entry["name"] == name]
        if not theirs:
            present = ", ".join(f'"{entry["name"]}"' for entry in saved) or "none"
            raise CheckpointError(
                f'{path} holds no state of an optimizer named "{name}"; its optimizers: {present}. '
                "optimizers=[...] says which ones to restore"
            )
        if len(mine) != len(theirs):
            raise CheckpointError(
                f'{path} holds the state of {len(theirs)} optimizers named "{name}", and there are '
                f"{len(mine)} here; say which by optimizers=[...]"
            )
        pairs += zip(mine, theirs, strict=True)
    return pairs
