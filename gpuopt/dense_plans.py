"""The plans of an optimizer's dense updates, kept from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends import Target, backend_for
from gpuopt.device import Device
from gpuopt.variable import Variable

# Of lists of variables; who updates other ones in each step gains nothing from old plans.
_MOST_PLANS = 256


class Batch(NamedTuple):
    """Variables of one device and dtype, with the backend's plan of their update.

    Attributes:
        positions: Where they stand in the list of variables; None if they are the list.
    """

    device: Device
    dtype: np.dtype[Any]
    positions: Sequence[int] | None
    plan: Any


class _Plan(NamedTuple):
    slots_version: int
    batches: list[Batch]
    # Only watched: their callbacks drop the plan.
    variables: list[weakref.ref[Variable]]


class DensePlans:
    """Finds the plan for a list of variables again, as long as they all live.

    A plan holds arrays, and goes as soon as one of its variables does. So there is none for a raw
    array, whose memory would be kept from going.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def has(self, variables: Sequence[Variable], slots_version: int) -> bool:
        """Says whether these variables were planned for, and no slots have come since."""
        plan = self._plans.get(_key(variables))
        return plan is not None and plan.slots_version == slots_version

    def find(
        self,
        variables: Sequence[Variable],
        slots_version: int,
        target_of: Callable[[Variable], Target],
    ) -> list[Batch]:
        """Returns the batches that these variables are updated in, planned anew if need be.

        Args:
            variables: In the order of their gradients.
            slots_version: Changes when slots may have been replaced.
            target_of: Returns a variable's array and slots.
        """
        key = _key(variables)
        plan = self._plans.get(key)
        if plan is not None and plan.slots_version == slots_version:
            return plan.batches
        batches = _batches(variables, target_of)
        if not any(variable.is_raw_array for variable in variables):
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            forget = partial(_forget, weakref.ref(self), key)
            watched = [weakref.ref(variable, forget) for variable in variables]
            self._plans[key] = _Plan(slots_version, batches, watched)
        return batches


def _batches(variables: Sequence[Variable], target_of: Callable[[Variable], Target]) -> list[Batch]:
    groups: dict[tuple[Device, np.dtype[Any]], list[int]] = {}
    for position, variable in enumerate(variables):
        groups.setdefault((variable.device, variable.dtype), []).append(position)
    return [
        Batch(
            device,
            dtype,
            None if len(groups) == 1 else positions,
            backend_for(device).plan_dense([target_of(variables[at]) for at in positions]),
        )
        for (device, dtype), positions in groups.items()
    ]


def _forget(
    plans: weakref.ref[DensePlans], key: tuple[int, ...], dead: weakref.ref[Variable]
) -> None:
    living = plans()
    if living is not None:
        living._plans.pop(key, None)


def _key(variables: Sequence[Variable]) -> tuple[int, ...]:
    return tuple(map(id, variables))
