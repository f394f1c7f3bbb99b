"""A rule's scalars, of one group of variables or of several, as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import FewScalars
from gpuopt.backends.cuda.workspace import Constants
from gpuopt.rules.update_rule import UpdateRule


class ScalarArguments:
    """What one launch is given for scalars, on one stream.

    Those of one group, or of few, are passed by value. Those of many are uploaded when they have
    changed.
    """

    def __init__(
        self, launcher: Launcher, rule: UpdateRule, dtype: np.dtype[Any], has_groups: bool
    ) -> None:
        self._rule = rule
        self._has_groups = has_groups
        self._real = compute_type(dtype)
        self._few = kernels.few_groups(rule, name_of(dtype))
        self._many = Constants(launcher)

    def of(self, scalars: Sequence[Scalars]) -> dict[str, Any]:
        """Returns the kernel's arguments by name, given the scalars of each group."""
        if not self._has_groups:
            return {"scalars": kernels.scalars_of(self._rule, scalars[0])}
        names = self._rule.scalars
        # Quicker than an array of lists.
        rows = np.fromiter((each[name] for each in scalars for name in names), self._real)
        if len(scalars) <= self._few:
            return {"few_scalars": FewScalars(rows.tobytes()), "many_scalars": None}
        on_device = self._many.set(rows, self._real)
        return {"few_scalars": FewScalars(b""), "many_scalars": on_device}
