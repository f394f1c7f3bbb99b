"""Tables whose rows may be behind their steps: who reads or writes one brings it up to date."""

from __future__ import annotations

from typing import Any, Protocol


class RowsBehind(Protocol):
    """Knows which rows of a table have missed steps, and what these would have done."""

    def bring_up(self, rows: Any = None) -> None:
        """Brings rows up to date, and the same rows of the table's slots.

        Args:
            rows: Integers within range, of any shape; they may repeat. None for all rows.
        """
