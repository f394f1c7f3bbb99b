"""A rule's scalars, of one group of variables or of several, as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.mixed import Storage, real_of
from gpuopt.backends.cuda.structs import ClippedScalars, FewScalars, ScaledScalars
from gpuopt.backends.cuda.workspace import Constants
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.rules.update_rule import UpdateRule


class ScalarArguments:
    """The arguments of one launch for scalars, on one stream.

    Those of one group, or of few, are passed by value. Those of many are uploaded when they have
    changed.
    """

    def __init__(
        self, launcher: Launcher, rule: UpdateRule, storage: Storage, has_groups: bool
    ) -> None:
        self._rule = rule
        self._launcher = launcher
        self._has_groups = has_groups
        self._real = np.dtype(real_of(storage))
        self._few = kernels.few_groups(rule, storage)
        self._many = Constants(launcher)

    def of(self, scalars: Sequence[Scalars], record: StepRecord = NOTHING_KNOWN) -> dict[str, Any]:
        """Returns the kernel's arguments by name, given the scalars of each group and count."""
        if not self._has_groups:
            return {"scalars": kernels.scalars_of(self._rule, scalars[0]), "many_scalars": None}
        names = self._rule.scalars
        # Quicker than an array of lists.
        rows = np.fromiter((each[name] for each in scalars for name in names), self._real)
        by_value, on_device = rows.tobytes(), None
        if len(scalars) > self._few:
            by_value, on_device = b"", self._many.set(rows, self._real)
        few = self._by_value(by_value, record, len(scalars))
        return {"scalars": few, "many_scalars": on_device}

    def _by_value(
        self, rows: bytes, record: StepRecord, num_scalars: int
    ) -> FewScalars | ClippedScalars | ScaledScalars:
        rule, address = self._rule, self._launcher.address
        if not (rule.is_scaled or rule.is_clipped):
            return FewScalars(rows)
        factors = 0 if record.factors is None else address(record.factors)
        if not rule.is_scaled:
            return ClippedScalars(factors, rows)
        num_made, num_groups = address(record.refused.num_made), num_scalars // record.num_counts
        return ScaledScalars(factors, num_made, record.most_made, num_groups, rows)
