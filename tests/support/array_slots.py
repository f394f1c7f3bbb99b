"""The slots of an optimizer that are arrays of as many elements as their variables, or rows."""

from __future__ import annotations

from typing import Any


def array_slots(optimizer: Any) -> list[str]:
    """Returns the names of all slots but those that count a variable's steps."""
    return [each for each in optimizer.get_slot_names() if each not in ("step", "mu_product")]
