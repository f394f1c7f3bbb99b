"""Options that have one of a few values."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any


def is_one_of(given: Any, choices: Collection[Any]) -> bool:
    """Whether an option has one of its values: an array, of which each element may be, has none."""
    return isinstance(given, Hashable) and given in choices
