"""Settings that must be equal in all processes of a training, and the error that names a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from gpuopt.distributed.communicator import Communicator, say_who
from gpuopt.optimizer import Optimizer
from gpuopt.step.step import checked_global_step
from gpuopt.variables.variable import Variable

_MOST_DIFFERENCES = 5
_DIGEST_BYTES = 8


def refuse_differences(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raises ValueError if ranks bring different things, as text by name."""
    differences = []
    for name in dict.fromkeys(name for brought in of_ranks for name in brought):
        forms = [brought.get(name, "none") for brought in of_ranks]
        if len(set(forms)) > 1:
            differences.append(f"{name}: {say_who(forms)}")
    if differences:
        shown = ". ".join(differences[:_MOST_DIFFERENCES])
        more = len(differences) - _MOST_DIFFERENCES
        shown += f". And {more} more" if more > 0 else ""
        raise ValueError(f"all ranks must bring the same, got {shown}")


class Agreement:
    """Compares what the processes of a `MirroredStrategy` bring to a step.

    Within one process, replicas share the optimizer and the global step: nothing is compared.
    """

    def __init__(self, check: bool) -> None:
        """With `check`, values are compared in every step, also those on GPUs."""
        self._check = check
        # Those whose first step has been made.
        self._known: WeakSet[Optimizer] = WeakSet()

    def compare_values(
        self,
        communicator: Communicator,
        optimizer: Optimizer,
        copies: Sequence[tuple[str, Variable]],
        what: str,
    ) -> None:
        """Compares values of variables and of the optimizer's state, in its first step.

        All ranks call it, with their copies of the variables by the names that these have
        everywhere.

        Raises:
            ValueError: they differ.
        """
        is_spread = communicator.local.size < communicator.size
        if is_spread and self._compares_values(optimizer):
            mine = _digest_values(optimizer, copies, reads_gpus=self._check)
            refuse_differences(communicator.all_gather(mine, f"values before {what}"))

    def describe_settings(
        self, communicator: Communicator, optimizer: Optimizer, global_step: Any
    ) -> str:
        """Returns the settings of this process beside gradients; "" if it is alone."""
        local = communicator.local
        if local.size == communicator.size:
            return ""
        # One rank's: another one's thread may set them meanwhile.
        mine = _describe_settings(optimizer, global_step) if local.rank == 0 else ""
        if local.rank == 0 and self._compares_values(optimizer):
            # A rank that has raised alone compares, and the others would not: all hear of it before
            # any of them updates, and all compare the next time.
            mine += ", comparing values"
        return local.all_gather(mine, "settings")[0]  # type: ignore[no-any-return]

    def note_step(self, optimizer: Optimizer) -> None:
        """Notes that all processes have made a step with this optimizer."""
        self._known.add(optimizer)

    def forget_steps(self) -> None:
        """Has all values compared again: a rank has failed, and may have stayed behind."""
        self._known.clear()

    def _compares_values(self, optimizer: Optimizer) -> bool:
        return self._check or optimizer not in self._known


def _describe_settings(optimizer: Optimizer, global_step: Any) -> str:
    settings = optimizer._hyperparameters_to_save()
    settings["on_nonfinite"] = optimizer._on_nonfinite
    for name, other in optimizer.state.others().items():
        if other.memory.kind == "cpu" and not other.shape:
            settings[name] = other.numpy().item()
    described = [f"{name} {value!r}" for name, value in settings.items()]
    return ", ".join(["", *described, _describe_counter(global_step)])


def _describe_counter(global_step: Any) -> str:
    if global_step is None:
        return "no global step"
    try:
        counter = checked_global_step(global_step)
    except (TypeError, ValueError):
        return "a wrong global step"  # which the update refuses
    if counter.memory.kind == "gpu":
        return "a global step on a GPU"
    return f"global step {counter.numpy().item()}"


def _digest_values(
    optimizer: Optimizer, copies: Sequence[tuple[str, Variable]], *, reads_gpus: bool
) -> dict[str, str]:
    """Returns a digest of each value, by a name that it has on all ranks."""
    state = optimizer.state
    # A restored value counts already while it waits for its slot.
    values: dict[str, Any] = {f'"{name}"': value for name, value in state.waiting_others.items()}
    values.update({f'"{name}"': other for name, other in state.others().items()})
    for name, copy in copies:
        values[f'"{name}"'] = copy
        for (slot_name, variable_name), value in list(state.waiting_slots.items()):
            if variable_name == copy.name:
                values[f'slot "{slot_name}" of "{name}"'] = value
        of_wrapper = state.wrapper_state
        for slot_name in state.slot_names():
            slot = state.slot(copy, slot_name)
            if of_wrapper is not None and of_wrapper.is_stale(slot_name, copy.identity):
                continue  # it has no part in any run
            if slot is not None:
                values[f'slot "{slot_name}" of "{name}"'] = slot
    return {
        name: _digest(value)
        for name, value in values.items()
        if reads_gpus or not isinstance(value, Variable) or value.memory.kind == "cpu"
    }


def _digest(value: Any) -> str:
    array = np.ascontiguousarray(value.numpy() if isinstance(value, Variable) else value)
    data = array.reshape(-1).view(np.uint8).data
    return f"values with digest {hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()}"
