"""Warnings about calls that train wrongly or slowly, and raise no error."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from gpuopt.step.known import Group
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

_logger = logging.getLogger("gpuopt")

# As many calls in a row make a pattern.
_CALLS = 3
# For tables of at least this height, a warning mentions the cost of updating every row.
_TALL_TABLE_ROWS = 1_000_000


class _Call(NamedTuple):
    """A call whose variables were new to the optimizer.

    Attributes:
        uses: Grows when the same variables come again.
        forms: Shape, dtype and device of the raw arrays, if all of these were new.
        variable: A reference to the identity of the first variable.
        members: The `id` of each variable's identity.
    """

    uses: list[None]
    forms: Sequence[Any]
    variable: weakref.ref[Identity]
    members: Set[int]

    def is_gone(self) -> bool:
        """Whether its first variable is not alive any more."""
        identity = self.variable()
        return identity is None or identity.holder() is None


class Misuse:
    """Notices two mistakes in the calls of one optimizer, by those with new variables.

    One call for each parameter or layer, where all share one count of steps; and new arrays in the
    place of old ones, which start without state. Calls with known variables take no time. Also
    hints at the cost of updates of all rows of a tall table.
    """

    def __init__(self, optimizer: str, instead_of_all_rows: str) -> None:
        """Begins without any call.

        Args:
            optimizer: What the optimizer's class is called.
            instead_of_all_rows: The class that does the same for named rows alone; "" if none does.
        """
        self._optimizer = optimizer
        self._instead = instead_of_all_rows
        # Calls in a row, all of whose variables were new; and such as had arrays of the same forms.
        self._apart: list[_Call] = []
        self._alike: list[_Call] = []
        self._last: _Call | None = None
        self._warned: set[str] = set()
        self._hint_given = False

    def note_call(
        self,
        groups: Sequence[Group],
        variables: Sequence[Variable],
        new: Sequence[Variable],
        shares_count: bool,
    ) -> None:
        """Notes a call with variables that were not known together.

        Args:
            groups: The call's groups.
            variables: Its variables.
            new: Those of them that had no slots.
            shares_count: Whether all variables share one count of steps.
        """
        raw = [each for each in variables if each.is_raw_array]
        are_new = len(raw) == len([each for each in new if each.is_raw_array])
        forms = [(each.shape, each.dtype, each.device) for each in raw] if are_new else []
        members = {id(each.identity) for each in variables}
        call = _Call([], forms, weakref.ref((raw or variables)[0].identity), members)
        for group in groups:
            group.uses = call.uses
        if self._last is not None and self._last.uses:
            self._apart, self._alike = [], []
        # A variable is new again after a step that was skipped.
        if not all(call.members.isdisjoint(earlier.members) for earlier in self._apart):
            self._apart = []
        is_apart = shares_count and len(variables) == len(new)
        self._apart = [*self._apart[1 - _CALLS :], call] if is_apart else []
        is_alike = forms and (not self._alike or forms == self._alike[-1].forms)
        self._alike = [*self._alike[-_CALLS:], call] if is_alike else [call] if forms else []
        self._last = call
        if len(self._apart) == _CALLS and not self._apart[0].is_gone():
            self._warn(
                "three calls in a row had different variables, as in a loop with one call for each "
                f"parameter or layer. {self._optimizer} counts each call as one step of training, "
                "so later calls of the loop make smaller steps: pass all pairs of a step in one "
                "call, or all parameters in one list or dict to update(params, grads)"
            )
        elif len(self._alike) > _CALLS and self._alike[0].is_gone():
            self._warn(
                "in three steps in a row, all arrays were new and had the shapes of those before. "
                f"{self._optimizer} drops the slots of an array that is deleted, so new arrays "
                "start without momentum: write into the old array, as in w[...] = value, or use "
                "update(params, grads), which finds a parameter by its path in a list or dict"
            )

    def hint_at_cost(self, table: Variable, num_rows: int) -> None:
        """Called before all rows of a table are updated for a gradient of `num_rows` rows."""
        if self._hint_given or table.shape[0] < _TALL_TABLE_ROWS:
            return
        self._hint_given = True
        _logger.warning(
            '%s updates all %d rows of "%s" for a gradient of %d rows, as TensorFlow does%s',
            self._optimizer,
            table.shape[0],
            table.name,
            num_rows,
            self._instead and f"; {self._instead} updates only the rows of the gradient",
        )

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=num_frames_of_package())


def num_frames_of_package() -> int:
    """Returns the `stacklevel`, in the function that calls this, of the first caller outside."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "gpuopt":
        frame, level = frame.f_back, level + 1
    return level
