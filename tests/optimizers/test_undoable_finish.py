"""A step goes on before a GPU has checked its rows only if its `_finish` can be taken back."""

from __future__ import annotations

from typing import Any

import fake_cupy
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.optimizers.base import undoable

pytestmark = [pytest.mark.contract, pytest.mark.emulator, pytest.mark.usefixtures("emulated_gpus")]

finished: list[str] = []


class Inherits(gpuopt.AdamOptimizer):
    pass


class Overrides(gpuopt.AdamOptimizer):
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        super()._finish(update_ops, name_scope)
        finished.append(name_scope)


class OverridesOnceMore(Overrides):
    pass


class Mixin:
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        finished.append(name_scope)


class MixesIn(Mixin, gpuopt.GradientDescentOptimizer):
    pass


class OverridesInAPackageNamedLikeOurs(gpuopt.AdamOptimizer):
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        finished.append(name_scope)

    _finish.__module__ = "gpuopt.of_a_user"


class DeclaresItsOwn(gpuopt.AdamOptimizer):
    @undoable
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        super()._finish(update_ops, name_scope)


def step_with_a_bad_row(optimizer: gpuopt.Optimizer) -> None:
    table = Variable(np.ones((4, 2), np.float32), name="table", device="gpu:0")
    with fake_cupy.cuda.Device(0):
        values = fake_cupy.asarray(np.ones((1, 2), np.float32))
        rows = fake_cupy.asarray(np.array([9]))
    optimizer.apply_gradients([(IndexedSlices(values, rows), table)])


@pytest.mark.parametrize(
    "cls", [gpuopt.AdamOptimizer, gpuopt.GradientDescentOptimizer, Inherits, DeclaresItsOwn]
)
def test_a_step_that_can_be_taken_back_does_not_wait_for_the_check(
    cls: type[gpuopt.Optimizer],
) -> None:
    optimizer = cls(0.1)
    step_with_a_bad_row(optimizer)
    with pytest.raises(IndexError, match='"table": row 9'):
        optimizer.check()


@pytest.mark.parametrize(
    "cls", [Overrides, OverridesOnceMore, MixesIn, OverridesInAPackageNamedLikeOurs]
)
def test_a_finish_of_ones_own_runs_only_after_the_check(cls: type[gpuopt.Optimizer]) -> None:
    finished.clear()
    with pytest.raises(IndexError, match='"table": row 9'):
        step_with_a_bad_row(cls(0.1))
    assert finished == []


def test_a_finish_that_is_put_on_an_optimizer_runs_only_after_the_check() -> None:
    finished.clear()
    optimizer = gpuopt.AdamOptimizer(0.1)
    optimizer._finish = lambda update_ops, name_scope: finished.append(name_scope)
    with pytest.raises(IndexError, match='"table": row 9'):
        step_with_a_bad_row(optimizer)
    assert finished == []
