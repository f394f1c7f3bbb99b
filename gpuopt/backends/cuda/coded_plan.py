"""Launches of dense updates of variables whose slots are in 8 bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.dense_plan import DensePlan
from gpuopt.backends.cuda.launch_shapes import LANE_CODES, lanes_per_block
from gpuopt.backends.cuda.launcher import Launch, to_device
from gpuopt.backends.cuda.mixed import Storage
from gpuopt.backends.cuda.summed_launch import SummedLaunch
from gpuopt.rules.update_rule import UpdateRule


class CodedPlan(DensePlan):
    """The tables of one set of variables whose slots are in 8 bits; see `DensePlan`.

    A variable whose blocks do not end at rows is one row.
    """

    def _sizes_and_pack(self) -> tuple[np.ndarray[Any, Any], int]:
        # Of the lanes that share blocks: where these are short, some elements are not there.
        widths, per_block = self._widths(), self.codecs.per_block
        lanes = np.array([lanes_per_block(each, per_block) for each in widths.tolist()], np.int64)
        return self._sizes // widths * -(-widths // per_block) * lanes * LANE_CODES, LANE_CODES

    def _has_groups(self, rule: UpdateRule) -> bool:
        return True

    def _table(self) -> np.ndarray[Any, Any]:
        numbers = self._first_numbers()
        return np.column_stack((self._sizes, self._widths(), numbers, self._addresses))

    def _widths(self) -> np.ndarray[Any, Any]:
        """Returns how many elements lie between the ends of rows, of each variable."""
        every = [self.targets[i] for i in self._positions]
        ends_at_rows = [target.slots[-1].ndim == 2 for target in every]
        shapes = [target.var.shape for target in every]
        widths = [
            math.prod(shape[1:] if ends else shape)
            for shape, ends in zip(shapes, ends_at_rows, strict=True)
        ]
        return np.array(widths, np.int64)

    def _bind(
        self, rule: UpdateRule, storage: Storage, scalars: dict[str, Any], refused: Any
    ) -> Launch | SummedLaunch:
        arguments = self._arguments(rule, refused)
        update = kernels.coded_update(rule, self.codecs.coded, storage)
        if rule.sums:
            forms = kernels.sum_coded_terms(rule, self.codecs.coded, storage), update
            return self._bind_summed(rule, storage, scalars, forms, arguments)
        arguments["groups"] = to_device(self._launcher, self._groups_or_zeros())
        return self._launcher.bind(update, *self._shape(), **scalars, **arguments)
