"""What a new rule does to a few numbers: rules that could not train are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gpuopt.rules.update_rule import UpdateRule


def refuse_by_trial(rule: UpdateRule) -> None:
    """Calls a rule once or a few times.

    What it raises otherwise is raised by the first step, which says for which variable.

    Raises:
        TypeError: the rule returns something.
        ValueError: it writes to none of its arrays, or to a slot of rows what differs within rows.
    """
    returned, error, has_effect = _try_out(rule, rule.row_slots)
    if error is not None:
        _refuse_elements_in_row_slots(rule)
        return
    if returned is not None:
        raise TypeError(
            f"{rule.name}: an update rule writes into its arrays and returns nothing, got "
            f"{type(returned).__name__}: write `var -= ...` for `return var - ...`"
        )
    if not has_effect:
        raise ValueError(
            f"{rule.name} writes to none of its arrays, so it would train nothing: write "
            "`var -= ...` or `var[...] = ...` for `var = ...`"
        )


class _Trial(NamedTuple):
    """A call of a rule.

    Attributes:
        returned: What it returns.
        error: What it raises.
        has_effect: Whether it writes to any array.
    """

    returned: object
    error: Exception | None
    has_effect: bool


def _try_out(rule: UpdateRule, row_slots: Sequence[str]) -> _Trial:
    """Calls a rule as if these alone were its slots of rows."""
    shape: tuple[int, ...] = (4, 3) if rule.row_slots else (4,)
    shapes = [rule.slot_shape(slot, shape) if slot in row_slots else shape for slot in rule.slots]
    grad = np.resize([-50.0, -0.25, 0.75, 3.0], shape)
    var, *slots = (np.resize([0.5, 2.0, -1.0, 10.0], each) for each in (shape, *shapes))
    before = [array.copy() for array in (var, *slots)]
    scalars: dict[str, Any] = dict.fromkeys(rule.scalars, np.float64(0.5))
    if rule.row_slots:
        [of_rows] = rule.computed
        scalars[of_rows] = np.mean(grad * grad, axis=1, keepdims=True)
    returned, error = None, None
    with np.errstate(all="ignore"):
        try:
            apply: Any = rule.apply
            returned = apply(var, grad, *slots, **scalars)
        except Exception as raised:
            error = raised
    return _Trial(returned, error, not all(map(np.array_equal, before, (var, *slots))))


def _refuse_elements_in_row_slots(rule: UpdateRule) -> None:
    if _try_out(rule, []).error is not None:
        return
    for slot in rule.row_slots:
        error = _try_out(rule, [slot]).error
        if error is not None:
            raise ValueError(
                f'{rule.name} writes numbers of elements to its slot of rows "{slot}", which is '
                f"[num_rows, 1]: what it writes there must follow from the slots of rows and the "
                f"scalars alone ({error})"
            )


def refuse_other_degrees(rule: UpdateRule) -> None:
    """Compares what a rule sums of a gradient, and of twice as much beside other slots."""
    var, grad = np.array([0.5, 2.0, -1.0, 10.0]), np.array([-50.0, -0.25, 0.75, 3.0])
    with np.errstate(all="ignore"):
        try:
            once, twice = (
                _terms(rule, var, times * grad, np.full_like(var, other))
                for times, other in ((1, 0.25), (2, 3.0))
            )
        except Exception:
            return
    for name, degree, mine, doubled in zip(rule.sums, rule.degrees, once, twice, strict=True):
        if not np.allclose(doubled, 2.0**degree * mine, rtol=1e-9, atol=0):
            raise ValueError(
                f"{rule.name} sums what is not of degree {degree} in the gradient alone, as "
                f"degrees={rule.degrees} says of {name}: of twice the gradient, and of other slots "
                f"and scalars, terms are {doubled} for {mine}. Give its degree, or no degrees"
            )


def _terms(rule: UpdateRule, var: Any, grad: Any, others: Any) -> Sequence[Any]:
    assert rule.terms is not None, "it has sums"
    slots = [others.copy() for _ in rule.slots]
    scalars = {name: others[0] for name in rule.scalars if name not in rule.sums}
    scalars |= dict.fromkeys(rule.sums, np.float64(0))
    return rule.terms(var, grad, *slots, **scalars)
