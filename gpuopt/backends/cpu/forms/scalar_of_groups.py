"""What stands for the scalars of several groups while their rule is recorded, once for all."""

from __future__ import annotations

from itertools import repeat
from operator import pow as power
from typing import Any, NoReturn

import numpy as np

_Operators = np.lib.mixins.NDArrayOperatorsMixin


class GroupsDiffer(Exception):
    """A rule makes other calls for one group than for another, or it may."""


class ScalarOfGroups(_Operators):
    """A scalar of several groups, as an update rule sees it.

    What is computed of it is computed of each group's value, as if it were that number. A decision
    by it must be the same in all groups; anything else raises `GroupsDiffer`.

    Attributes:
        values: [num_groups].
    """

    ndim = 0

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        if not _are_scalars(*operands):
            return NotImplemented
        if method != "__call__" or ufunc.nout != 1 or options:
            raise GroupsDiffer
        return _of_each_group(ufunc, *operands)

    # A power of numbers is not always rounded as numpy's power of arrays.
    def __pow__(self, exponent: Any) -> ScalarOfGroups:
        return _of_each_group(power, self, exponent) if _are_scalars(exponent) else NotImplemented

    def __rpow__(self, base: Any) -> ScalarOfGroups:
        return _of_each_group(power, base, self) if _are_scalars(base) else NotImplemented

    def __bool__(self) -> bool:
        decisions = set(map(bool, self.values))
        if len(decisions) > 1:
            raise GroupsDiffer
        return decisions.pop()

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        raise GroupsDiffer

    __array__ = __float__ = __int__ = __index__ = __complex__ = _refuse
    __hash__ = __round__ = __trunc__ = __format__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupsDiffer


def _are_scalars(*operands: Any) -> bool:
    others = [x for x in operands if not isinstance(x, ScalarOfGroups | np.generic | float | int)]
    # What stands for a chunk has its own part in this.
    if not all(isinstance(x, _Operators) for x in others):
        raise GroupsDiffer
    return not others


def _of_each_group(function: Any, *operands: Any) -> ScalarOfGroups:
    each = [x.values if isinstance(x, ScalarOfGroups) else repeat(x) for x in operands]
    return ScalarOfGroups(np.array(list(map(function, *each))))
