"""The plans of an optimizer's dense updates, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends import Target, backend_for
from gpuopt.by_variables import ByVariables
from gpuopt.device import Device
from gpuopt.identity import Identity
from gpuopt.variable import Variable


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


class DensePlans:
    """Finds the plan for a list of variables again, as long as they all live."""

    def __init__(self) -> None:
        self._plans: ByVariables[_Plan] = ByVariables()

    def has(self, variables: Sequence[Variable], slots_version: int) -> bool:
        """Says whether these variables were planned for, and no slots have come since."""
        plan = self._plans.get(variables)
        return plan is not None and plan.slots_version == slots_version

    def find(
        self,
        variables: Sequence[Variable],
        slots_version: int,
        target_of: Callable[[Variable], tuple[Target, list[Identity]]],
    ) -> list[Batch]:
        """Returns the batches that these variables are updated in, planned anew if need be.

        Args:
            variables: In the order of their gradients.
            slots_version: Changes when slots may have been replaced.
            target_of: Returns a variable's array and slots, and their identities.
        """
        plan = self._plans.get(variables)
        if plan is None or plan.slots_version != slots_version:
            plan = _Plan(slots_version, _batches(variables, target_of))
            self._plans.keep(variables, plan)
        return plan.batches


def _batches(
    variables: Sequence[Variable],
    target_of: Callable[[Variable], tuple[Target, list[Identity]]],
) -> list[Batch]:
    groups: dict[tuple[Device, np.dtype[Any]], list[int]] = {}
    for position, variable in enumerate(variables):
        groups.setdefault((variable.device, variable.dtype), []).append(position)
    batches = []
    for (device, dtype), positions in groups.items():
        targets, identities = zip(*[target_of(variables[at]) for at in positions], strict=True)
        plan = backend_for(device).plan_dense(targets, list(chain.from_iterable(identities)))
        batches.append(Batch(device, dtype, None if len(groups) == 1 else positions, plan))
    return batches
