"""Loss scales in saved states, also of states without one or of another manager."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.rules.loss_scaling import LARGEST_SCALE
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

SCALE: Final = "loss_scale"
# Of managers that change the scale.
STEPS: Final = ("good_steps", "bad_steps")
COUNTS: Final = ("num_skipped", "skipped_in_a_row")
NAMES: Final = frozenset((SCALE, *STEPS, *COUNTS))

# Names of variables: a second variable of one name has a number behind it.
_VARIABLES = re.compile(rf"(?:{'|'.join((SCALE, *STEPS))}|{SCALE}/(?:{'|'.join(COUNTS)}))(?:_\d+)?")


class Start(NamedTuple):
    """The initial value of a number of loss scaling.

    Attributes:
        value: A numpy scalar.
        stays: Whether it is a scale that never changes: it is the manager's, whatever was saved.
    """

    value: Any
    stays: bool


ZERO: Final = Start(np.int64(0), stays=False)

_starts: WeakKeyDictionary[Identity, Start] = WeakKeyDictionary()


def note_start(variable: Variable, start: Start) -> None:
    """Sets the value that a variable gets if a saved state has none for it."""
    _starts[variable.identity] = start


def refuse_half_saved(names: Iterable[str]) -> None:
    """Raises ValueError if a state has some of the numbers that a loss scale saves together."""
    present = NAMES.intersection(names)
    together: list[tuple[str, ...]] = [(), COUNTS, (SCALE, *COUNTS), (SCALE, *STEPS, *COUNTS)]
    expected = next(each for each in together if present.issubset(each))
    for name in expected:
        if name not in present:
            raise ValueError(
                f'the state has no "{name}": it was saved without, but with "{min(present)}", as '
                "no LossScaleOptimizer does"
            )


def taken_over(
    own: Mapping[str, Variable], non_slots: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the variables' values after a load, by name, and the other entries of the state.

    Raises:
        ValueError: the state has a number that no run makes, or lacks one that is saved with others
            that it has.
    """
    refuse_half_saved(non_slots)
    saved = {
        name: _checked_value(name, non_slots[name], variable)
        for name, variable in own.items()
        if name in non_slots
    }
    others = {name: value for name, value in non_slots.items() if name not in NAMES}
    return {**saved, **starts_anew(own, saved)}, others


def starts_anew(named: Mapping[str, Variable], saved: Iterable[str]) -> dict[str, Any]:
    """Returns the values that begin anew when a state with these names is restored, by name."""
    every = set(saved)
    found = {
        name: _starts[variable.identity]
        for name, variable in named.items()
        if variable.identity in _starts
    }
    return {
        name: np.asarray(start.value)
        for name, start in found.items()
        if start.stays or name not in every
    }


def of_loss_scales(names: Iterable[str]) -> set[str]:
    """Returns the names of a checkpoint's variables that are of loss scaling, if it has any."""
    found = {name for name in names if _VARIABLES.fullmatch(name)}
    return found if f"{SCALE}/{COUNTS[0]}" in found else set()


def _checked_value(name: str, value: Any, variable: Variable) -> Any:
    """Returns a saved number, or raises ValueError."""
    given = np.asarray(value)
    least = 1 if name == SCALE else 0
    most = LARGEST_SCALE if name == SCALE else np.iinfo(variable.dtype).max
    if given.shape != () or given.dtype != variable.dtype or not least <= given <= most:
        raise ValueError(
            f'"{name}" must be a number of {variable.dtype} from {least} to {most:.7g}; the saved '
            f"value is {value!r}"
        )
    return given[()]
