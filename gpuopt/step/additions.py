"""Hooks that wrappers add to a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from gpuopt.device import Device
from gpuopt.step.ledger import Ledger
from gpuopt.step.updates import Updates
from gpuopt.variables.variable import Variable

# Takes back what was made for a step on the devices that have refused it; None stands for all.
Forget = Callable[[Collection[Device] | None], None]


class Addition(Protocol):
    """A wrapper, as a step of the optimizer inside it sees it.

    What it writes is seen by a save together with the step, or not at all.
    """

    @property
    def _what_is_added(self) -> str:
        """Names the written values, for the error of an unfinished step; empty if none."""

    @property
    def _keeps_new_slots(self) -> bool:
        """Whether what was made for a step stays if `_makes_step` leaves the step out."""

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        """Called when nothing is written yet.

        Returns:
            The updates to make, these or others; and what takes back what this call has made, if
            the step is refused.
        """

    def _makes_step(self, updates: Updates) -> bool:
        """Called inside the gate before anything is written: whether the step is made.

        If not, nothing is written, nor counted, and no addition's other methods are called.
        """

    def _before_update(self, updates: Updates, ledger: Ledger) -> None:
        """Writes what comes before the updates."""

    def _written_beside(self, variables: Sequence[Variable]) -> Iterable[Variable]:
        """Returns the arrays that are written in a step of some variables, beside these."""

    def _accept_decided(self, is_counted: bool) -> None:
        """Called when an unfinished step is accepted, if a GPU decides about it.

        Args:
            is_counted: Whether the step was promised, and the GPU's decision counts it.
        """

    def _after_update(self, updates: Updates, ledger: Ledger) -> None:
        """Writes what follows the updates and the step's count.

        Args:
            updates: The step's.
            ledger: Of the step's optimizer: nothing may be written on a device that refuses
                rows of this step; see `Ledger.unless_refused`.
        """


def nothing_to_forget(devices: Collection[Device] | None) -> None:
    """The `Forget` of who makes nothing."""
