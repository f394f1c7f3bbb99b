"""Sums that a step is given as gradients, and that lack the last gradients when it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpuopt.backends import Backend
from gpuopt.backends.clips import Additions
from gpuopt.device import Device
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

Array = Any


class LateSum(NamedTuple):
    """One variable's sum.

    Attributes:
        gradient: What is still to be added.
        variable: The variable.
        total: Holds the sum, which the step is given.
        begins: Whether it begins with the gradient.
    """

    gradient: Array
    variable: Variable
    total: Variable
    begins: bool


class LateSums:
    """What a step on GPUs may add as it measures its gradients, so that no launch is for it alone.

    Whoever reads the sums otherwise calls `finish` before.
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
            factors_on: Returns `Additions.factors` on a device.
            add: Adds and divides.
        """
        self._left = {id(each.total.unread_storage): each for each in sums}
        self._divisor = divisor
        self._factors_on = factors_on
        self._add = add

    def take(
        self, device: Device, backend: Backend, sums: Sequence[Array]
    ) -> tuple[Additions, list[Identity]] | None:
        """Returns what the caller is to add to sums, and who they are, if it can.

        Args:
            device: Theirs.
            backend: Likewise.
            sums: Gradients of a step, of one dtype.
        """
        if not self._left or not backend.clips.adds:
            return None
        late = [self._left.get(id(each)) for each in sums]
        mine = [each for each in late if each is not None]
        if len(mine) < len(late) or len({each.gradient.dtype for each in mine}) != 1:
            return None
        for each in sums:
            del self._left[id(each)]
        gradients, begin = [each.gradient for each in mine], [each.begins for each in mine]
        added = Additions(gradients, begin, self._factors_on(device), self._divisor)
        return added, [each.total.identity for each in mine]

    def finish(self) -> None:
        """Adds what nobody has taken."""
        if self._left:
            left, self._left = list(self._left.values()), {}
            self._add(left)
