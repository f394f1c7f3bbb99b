"""Slots that a rule cannot update: a subclass has made them, or taken them away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = pytest.mark.contract


class NoSlots(gpuopt.MomentumOptimizer):
    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        pass


class ShortSlots(gpuopt.MomentumOptimizer):
    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        for variable in var_list:
            self._get_or_make_slot_with_initializer(
                variable, np.zeros, (4,), variable.dtype, "momentum", "short"
            )


class HookOnShortSlots(ShortSlots):
    def _apply_dense(self, grad: Any, var: Variable) -> None:
        super()._apply_dense(grad, var)

    def _apply_sparse(self, grad: Any, var: Variable) -> None:
        super()._apply_sparse(grad, var)


class WideSlots(gpuopt.MomentumOptimizer):
    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        for variable in var_list:
            self._get_or_make_slot_with_initializer(
                variable, np.zeros, variable.shape, np.float64, "momentum", "wide"
            )


def gradient_of(variable: Variable, is_sparse: bool) -> Any:
    ones = np.ones(variable.shape, variable.dtype)
    return IndexedSlices(ones[:2], [0, 2]) if is_sparse else ones


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("size", [9, 100_000])
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (NoSlots, '"w" has no slot "momentum", which the rule "momentum" updates'),
        (ShortSlots, r'slot "momentum" of "w" has shape \(4,\); the variable has shape'),
        (HookOnShortSlots, r'slot "momentum" of "w" has shape \(4,\); the variable has shape'),
    ],
)
def test_a_slot_that_is_missing_or_of_another_shape_is_refused_by_name(
    optimizer: Any, words: str, size: int, is_sparse: bool
) -> None:
    momentum = optimizer(1.0, 0.9)
    step = Variable(0, name="step")
    w = Variable(np.zeros((size, 2), np.float32), name="w")
    # A hook may have written before its error, so that its step is remembered as unfinished.
    for _ in range(1 if optimizer is HookOnShortSlots else 2):
        with pytest.raises(ValueError, match=words):
            momentum.apply_gradients([(gradient_of(w, is_sparse), w)], global_step=step)
    assert not w.numpy().any()
    assert int(step) == 0


def test_a_slot_replaced_by_one_of_another_shape_is_refused() -> None:
    w = Variable(np.zeros(6, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
    gradient = np.ones(6, np.float32)
    optimizer.apply_gradients([(gradient, w)])
    kept = optimizer.get_slot(w, "momentum")
    optimizer._slot_dict("momentum")[w.identity] = Variable(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r'slot "momentum" of "w" has shape \(2, 3\)'):
        optimizer.apply_gradients([(gradient, w)])
    optimizer._slot_dict("momentum")[w.identity] = kept
    optimizer.apply_gradients([(gradient, w)])
    assert w.numpy() == pytest.approx(-2.9)


def test_slots_of_another_dtype_are_updated_on_the_cpu() -> None:
    w = Variable(np.zeros(6, np.float32), name="w")
    optimizer = WideSlots(1.0, 0.9)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(6, np.float32), w)])
    assert optimizer.get_slot(w, "momentum").dtype == np.float64
    assert w.numpy() == pytest.approx(-2.9)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (NoSlots, '"w" has no slot "momentum"'),
        (ShortSlots, r'slot "momentum" of "w" has shape \(4,\)'),
        (WideSlots, 'slot "momentum" of "w" has dtype float64; on gpu:0 it must have .* float32'),
    ],
)
def test_kernels_get_no_slot_that_does_not_fit(optimizer: Any, words: str, is_sparse: bool) -> None:
    w = Variable(np.zeros((9, 2), np.float32), name="w", device="gpu:0")
    with pytest.raises(ValueError, match=words):
        optimizer(1.0, 0.9).apply_gradients([(gradient_of(w, is_sparse), w)])
    assert not w.numpy().any()


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_a_slot_on_another_device_is_refused() -> None:
    for here, there in [("gpu:0", "cpu"), ("cpu", "gpu:0"), ("gpu:0", "gpu:1")]:
        w = Variable(np.zeros(6, np.float32), name="w", device=here)
        optimizer = gpuopt.MomentumOptimizer(1.0, 0.9)
        slot = Variable(np.zeros(6, np.float32), device=there)
        optimizer._slot_dict("momentum")[w.identity] = slot
        with pytest.raises(ValueError, match=f'"momentum" of "w" is on {there}; .* on {here}'):
            optimizer.apply_gradients([(np.ones(6, np.float32), w)])
        del w


@pytest.mark.parametrize("hook", ["_scalars", "_hyper"])
def test_scalars_that_a_subclass_computes_are_computed_in_each_step(hook: str) -> None:
    rates = iter([1.0, 2.0, 4.0])

    def computed(self: Any, _: Any) -> Any:
        rate = np.float32(next(rates))
        return rate if hook == "_hyper" else {"learning_rate": rate}

    changing = type("Changing", (gpuopt.GradientDescentOptimizer,), {hook: computed})
    variable = gpuopt.Variable(np.zeros(2, np.float32))
    optimizer = changing(0.5)
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(2, np.float32), variable)])
    assert variable.numpy().tolist() == [-7, -7]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_planned_step_writes_the_slot_that_a_hyperparameter_has_replaced(is_sparse: bool) -> None:
    w = Variable(np.zeros((3, 2), np.float32), name="w")
    ones = np.ones((3, 2), np.float32)
    gradient = IndexedSlices(ones, np.arange(3)) if is_sparse else ones
    replaces = False

    def rate() -> float:
        if replaces:
            new = Variable(np.full((3, 2), 100, np.float32))
            optimizer._slot_dict("momentum")[w.identity] = new
        return 0.125

    optimizer = gpuopt.MomentumOptimizer(rate, 0.5)
    for _ in range(3):
        optimizer.apply_gradients([(gradient, w)])
    before = w.numpy()
    replaces = True
    optimizer.apply_gradients([(gradient, w)])
    slot = optimizer.get_slot(w, "momentum")
    assert slot is not None
    assert (slot.numpy() == 51).all()
    np.testing.assert_array_equal(w.numpy(), before - np.float32(0.125 * 51))
