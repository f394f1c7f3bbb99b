"""Which optimizers, rules and variables take `catch_up`; others refuse it with what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from late_pairs import Pair

import gpuopt
from gpuopt import IndexedSlices
from gpuopt.optimizers.base import Movement, RuleOptimizer, Unnamed

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("array", [np.ones((4, 2), "f4"), "adopted"], ids=["raw", "adopted"])
def test_arrays_are_refused_with_what_to_do(array: Any) -> None:
    if isinstance(array, str):
        array = gpuopt.Variable(np.ones((4, 2), "f4"), copy=False)
    optimizer = gpuopt.AdamOptimizer(catch_up=True)
    with pytest.raises(ValueError, match=r"gpuopt\.Variable\(array\), and read that; or leave out"):
        optimizer.apply_gradients([(IndexedSlices(np.ones((1, 2), "f4"), [1]), array)])
    assert not optimizer.variables()


@pytest.mark.parametrize("catch_up", [False, True, "stepping"])
def test_rows_of_a_table_with_a_constraint_are_refused(catch_up: Any) -> None:
    table = gpuopt.Variable(np.ones((4, 2), "f4"), constraint=lambda array: np.maximum(array, 0))
    optimizer = gpuopt.AdamOptimizer(0.5, catch_up=catch_up)
    with pytest.raises(RuntimeError, match="constraint"):
        optimizer.apply_gradients([(IndexedSlices(np.ones((1, 2), "f4"), [1]), table)])
    np.testing.assert_array_equal(table._array, 1)
    assert not optimizer.variables()
    for _ in range(3):  # of which the constraint makes 0
        optimizer.apply_gradients([(np.ones((4, 2), np.float32), table)])
    np.testing.assert_array_equal(table.numpy(), 0)


@pytest.mark.parametrize(
    "make",
    [gpuopt.LazyAdamOptimizer, gpuopt.extend_with_decoupled_weight_decay(gpuopt.LazyAdamOptimizer)],
)
def test_optimizers_that_leave_rows_alone_refuse_the_option(make: Any) -> None:
    arguments = {"weight_decay": 0.1} if "WeightDecay" in str(make.__mro__) else {}
    with pytest.raises(ValueError, match="there is nothing to catch up with"):
        make(catch_up=True, **arguments)
    with pytest.raises(
        TypeError, match='must be False, True or "stepping", got "yes"'.replace('"yes"', "'yes'")
    ):
        make(catch_up="yes", **arguments)
    for wrong in (1, None, np.ones(2)):
        with pytest.raises(TypeError, match='must be False, True or "stepping", got'):
            make(catch_up=wrong, **arguments)
    with pytest.raises(TypeError, match="catch_up"):
        gpuopt.MomentumOptimizer(0.1, 0.9, catch_up=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "unnamed",
    [
        Unnamed({"n": "beta"}),
        Unnamed({"m": "gamma"}),
        Unnamed({"m": "beta"}, Movement("rate", "m", "v", "beta")),
    ],
)
def test_what_a_rule_does_to_other_rows_must_be_of_its_slots_and_scalars(unnamed: Any) -> None:
    def rule(var: Any, grad: Any, m: Any, *, rate: Any, beta: Any) -> None:
        m *= beta
        m += grad
        var -= rate * m

    with pytest.raises(ValueError, match="must be"):
        gpuopt.update_rule(unnamed=unnamed)(rule)


def test_a_users_rule_may_let_rows_catch_up() -> None:
    @gpuopt.update_rule(unnamed=Unnamed({"m": "beta"}))
    def fading(var: Any, grad: Any, m: Any, *, rate: Any, beta: Any) -> None:
        m *= beta
        m += grad
        var -= rate * m * grad

    class Fading(RuleOptimizer):
        rule = fading
        rule_of_other_rows = fading

        def __init__(self, catch_up: Any = False, name: str = "Fading") -> None:
            super().__init__({"name": name}, rate=0.1, beta=0.9)
            self._set_catch_up(catch_up)

    pair = Pair(Fading)
    pair.step(20)
    assert pair.is_behind()
    pair.late.numpy()
    pair.check()
