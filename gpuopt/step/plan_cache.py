"""An optimizer's caches, keyed by lists of variables that are updated together."""

from __future__ import annotations

from collections.abc import Set

from gpuopt.step.known import KnownGroups, KnownObjects, StepPlan
from gpuopt.step.misuse import Misuse
from gpuopt.variables.identity import Identity


class PlanCache:
    """The plans of one optimizer.

    Attributes:
        groups: The cache of groups of variables that were updated together.
        steps: The cache of plans of whole steps.
        misuse: Warns of calls that train wrongly, by the groups that are new.
    """

    def __init__(self, misuse: Misuse) -> None:
        self.groups = KnownGroups()
        self.steps = KnownObjects[StepPlan]()
        self.misuse = misuse

    def forget(self, changed: Set[Identity]) -> None:
        """Drops the plans for variables that have got other arrays."""
        self.steps.forget(lambda plan: plan.has_changed(changed))
        self.groups.forget(changed)
