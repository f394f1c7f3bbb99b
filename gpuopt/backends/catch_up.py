"""A table's record of missed steps, by which a backend brings rows up to date."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.rules.catch_up import NUM_SUMS, STRIDE, Factors
from gpuopt.rules.update_rule import UpdateRule

Array = Any


class CatchUp:
    """The steps that each row of a table has made, and the effect of those that it has missed.

    A row and its entry of `last` are written together, so that they fit each other even after
    Ctrl-C. A step whose update was not finished is not counted: the rows that it has written have
    made it, and no others have missed it.

    Attributes:
        rule: The rule of rows without a gradient.
        factors: By which they are brought up to date.
        now: How many steps were counted; where a GPU may refuse them, at most so many.
        made_by_all: How many of them all rows have made, at least.
        last: int32 [height]: how many steps each row has made. A row may have made more than were
            counted, in a step that was not finished.
        steps: [room], in the type that the rule computes in: the step size of each step; None if
            rows without a gradient do not move.
        sums: float64 [-, 4]: for rows that have made 0 steps, `STRIDE`, twice as many and so
            on, up to `room`; None if steps are to be made one by one, or rows do not move.
        room: How many steps can be counted: then all rows are brought up to date, for a new count.
        rounding: The scalars of the last step, if numbers are rounded at random; else None. A GPU
            has its own, as it may leave steps out.
        on_device: A backend's own data for the table; None at first.
        last_update: Of when it was made, in the order of updates; see `Updated`.
    """

    __slots__ = (
        "factors",
        "last",
        "last_update",
        "made_by_all",
        "now",
        "on_device",
        "room",
        "rounding",
        "rule",
        "steps",
        "sums",
    )

    # Of steps that leave nothing behind but their number, which is of 32 bits.
    MOST_STEPS = 2**31 - 2

    def __init__(self, rule: UpdateRule, factors: Factors, last: Array, zeros: Any) -> None:
        """Begins to count.

        Args:
            rule: Of rows without a gradient.
            factors: Its numbers.
            last: Zeros.
            zeros: Returns an array of zeros of a shape, in the type that the rule computes in, or
                in `dtype`.
        """
        self.rule, self.factors, self.last = rule, factors, last
        self.now = self.made_by_all = 0
        self.steps = self.sums = None
        self.rounding: Any = None
        self.on_device: Any = None
        self.last_update: Any = None
        self.room = self.MOST_STEPS
        if factors.weights is not None:
            self.room = factors.room_for(len(last))
            self.steps = zeros((self.room,))
            if factors.tolerance >= 0:
                shape = (1 - (-self.room // STRIDE), NUM_SUMS)
                self.sums = zeros(shape, dtype=np.dtype(np.float64))

    def step_size(self, scalars: Any) -> np.floating[Any] | None:
        """Returns the step size among the rule's scalars; None if rows do not move."""
        unnamed = self.rule.unnamed
        assert unnamed is not None
        return None if unnamed.movement is None else scalars[unnamed.movement.step]
