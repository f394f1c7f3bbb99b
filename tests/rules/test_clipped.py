"""A clipped rule sees the clipped gradient, in both of its forms and in sums over rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from every_optimizer import update_rules

from gpuopt.optimizers.row_wise_adagrad import row_wise_adagrad
from gpuopt.rules.averaged import averaged
from gpuopt.rules.clipped import bounded, clipped
from gpuopt.rules.scaled import scaled
from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import staged
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.value


@pytest.mark.parametrize("rule", update_rules(), ids=lambda rule: rule.name)
def test_an_unscaled_and_clipped_rule_is_its_base_with_another_gradient(rule: UpdateRule) -> None:
    rng = np.random.default_rng(3)
    var, grad = rng.normal(size=(2, 40, 1))
    # A mean's square stays below the mean of squares.
    ranges = [(0, 0.5) if name == "mg" else (1, 2) for name in rule.slots]
    slots = [rng.uniform(*range_, var.shape) for range_ in ranges]
    scalars = {name: np.float64(rng.uniform(0.1, 0.9)) for name in rule.scalars}
    mine = clipped(scaled(bounded(rule)))
    assert mine is clipped(scaled(bounded(rule)))
    assert (mine.slots, mine.sums, mine.row_slots) == (rule.slots, rule.sums, rule.row_slots)
    clipping = {"clip_bound": np.float64(0.25), "unscale": np.float64(3), "clip_factor": 0.5}
    assert mine.scalars == (*rule.scalars, *clipping)
    seen = np.clip(grad * 3, -0.25, 0.25) * 0.5
    read = mine.gradient(grad, slots, clipping)
    if rule.terms is not None and mine.terms is not None:
        got = mine.terms(var, read, *slots, **scalars, **clipping)
        np.testing.assert_array_equal(got, rule.terms(var, seen, *slots, **scalars))
    expected = [array.copy() for array in (var, *slots)]
    rule.apply(expected[0], seen, *expected[1:], **scalars)
    mine.apply(var, read, *slots, **scalars, **clipping)
    np.testing.assert_array_equal([var, *slots], expected)


def test_a_row_wise_rule_takes_the_mean_square_of_the_clipped_gradient() -> None:
    grad, scalars = np.float64([[4.0, -1.0]]), {"clip_bound": np.float64(2), "clip_factor": 0.5}
    assert row_wise_adagrad.gradient(grad, [], scalars) is grad
    seen = clipped(bounded(row_wise_adagrad)).gradient(grad, [], scalars)
    np.testing.assert_array_equal(seen, [[1.0, -0.5]])


@pytest.mark.internal
def test_slots_of_stages_have_one_order_and_their_gradient_may_be_read_without_writing() -> None:
    def keep(grad: Any, kept: Any) -> None:
        kept += grad
        grad[...] = kept

    stage = Stage("clipped", keep, slots=("kept",))
    rule = averaged(staged(row_wise_adagrad, stage))
    assert rule.slots == ("_average", "kept", "accumulator")
    assert staged(averaged(row_wise_adagrad), stage).slots == rule.slots
    slots = [np.full(2, float(k)) for k in range(3)]
    for is_read_only, left in ((True, 1.0), (False, 4.0)):
        read = rule.gradient(np.full(2, 3.0), slots, {}, is_read_only=is_read_only)
        np.testing.assert_array_equal(read, [4.0, 4.0])
        np.testing.assert_array_equal(slots, [[0.0, 0.0], [left, left], [2.0, 2.0]])
    with pytest.raises(ValueError, match="both have slots"):
        staged(rule, stage)
