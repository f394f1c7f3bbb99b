"""A step that is made if its gradients are finite, as the norms tell that it takes anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.row_checks import RowChecks
from gpuopt.step.updates import Updates


class FiniteGradients:
    """An `Addition`: gradients are read once for both, and the host waits for their norms."""

    _what_is_added = ""
    _keeps_new_slots = False

    def __init__(self, makes_step_of: Callable[[str | None], bool]) -> None:
        """Takes the decision.

        Args:
            makes_step_of: Given the description of a gradient that is not finite, or None, returns
                whether the step is made.
        """
        self._makes_step_of = makes_step_of

    def _adds_to(self, optimizer: Any) -> bool:
        return True

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        updates.measure_all()
        return updates, nothing_to_forget

    def _makes_step(self, updates: Updates) -> bool:
        return self._makes_step_of(updates.find_nonfinite())

    def _before_update(self, updates: Updates, row_checks: RowChecks) -> None:
        pass

    def _after_update(self, updates: Updates, row_checks: RowChecks) -> None:
        pass
