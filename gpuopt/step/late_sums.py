"""Sums that a step is given as gradients, and that lack the last gradients when it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpuopt.backends.clips import AddedGradients
from gpuopt.device import Device
from gpuopt.variables.variable import Variable

Array = Any


class LateSum(NamedTuple):
    """One variable's sum.

    Attributes:
        gradient: What is still to be added.
        variable: The variable.
        total: Holds the sum, which the step is given.
        begins: Whether it begins with the gradient.
        plan: Of the sum and others, from `Backend.plan_dense`.
    """

    gradient: Array
    variable: Variable
    total: Variable
    begins: bool
    plan: Any


class LateSums:
    """What a step on GPUs may add as it measures its gradients, so that no launch is for it alone.

    Whoever reads the arrays otherwise calls `finish` before; the slots are not watched.
    """

    def __init__(
        self,
        sums: Sequence[LateSum],
        divisor: int,
        factors_on: Callable[[Device], Array | None],
        add: Callable[[Sequence[LateSum]], None],
    ) -> None:
        """Takes what is still to be added.

        Args:
            sums: Of variables on GPUs; the gradients share no memory with them.
            divisor: What the sums are divided by then.
            factors_on: Returns `AddedGradients.factors` on a device.
            add: Adds and divides.
        """
        # By the id of the array that the step is given, which `total` keeps alive.
        self._left = {id(each.total.unread_storage): each for each in sums}
        self._divisor = float(divisor)
        self._factors_on = factors_on
        self._add = add

    def take(self, device: Device, sums: Sequence[Array]) -> AddedGradients | None:
        """Returns what one launch is to add to all of these sums; None if none can.

        What it returns counts as added: the caller adds it before anybody reads the sums, or raises
        an error.

        Args:
            device: Of the sums.
            sums: Gradients of the step, of one dtype.
        """
        late = [self._left[id(each)] for each in sums if id(each) in self._left]
        if not late or len(late) < len(sums):
            return None
        if len({(id(each.plan), each.gradient.dtype, each.begins) for each in late}) > 1:
            return None
        for each in sums:
            del self._left[id(each)]
        gradients, first = [each.gradient for each in late], late[0]
        factors = self._factors_on(device)
        return AddedGradients(first.plan, gradients, first.begins, factors, self._divisor)

    def finish(self) -> None:
        """Adds what nobody has taken."""
        if self._left:
            left, self._left = self._left, {}
            self._add(list(left.values()))
