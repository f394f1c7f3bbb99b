"""Backends round bfloat16 arrays stochastically, each by the same random bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from every_backend import BACKENDS, BY_NAME, RULES, every_backend, misaligned, scalars_for
from four_slots import four_slots
from kernel_updates import Arrays, Update, apply_dense, apply_sparse, copy_of

from gpuopt.backends import Target
from gpuopt.backends.backend import SparseUpdate
from gpuopt.rules.averaged import AVERAGE_WEIGHT, averaged, moving_average
from gpuopt.rules.clipped import bounded, clipped
from gpuopt.rules.rounded import BFLOAT16, key_of_step, round_at_random, rounded
from gpuopt.rules.staged import StagedRule
from gpuopt.rules.update_rule import UpdateRule

Written = list[np.ndarray[Any, Any]]

# The last one has five arrays, and so two words of random bits for each element.
ELEMENTWISE = [
    *(rule for rule in RULES if not rule.row_slots),
    four_slots,
]
every_rule = pytest.mark.parametrize("rule", ELEMENTWISE, ids=lambda rule: rule.name)
SGD = RULES[0]
KEY = key_of_step(17, 5)
SHAPES = [(1,), (7,), (64,), (0,), (5, 3), (40, 30), (2000, 5), (), *[(40, 13)] * 4]


def rounding(rule: UpdateRule) -> UpdateRule:
    """Returns the rounded form of a rule; steps clip the gradients of that, not the other way."""
    return (
        clipped(bounded(rounded(rule.rule)))
        if isinstance(rule, StagedRule) and rule.is_clipped
        else rounded(rule)
    )


def given(backend: str, rule: UpdateRule) -> dict[str, Any]:
    return {**scalars_for(backend, rule), **KEY}


def wide(update: Update) -> Update:
    var, slots = update.var.astype(np.float32), [each.astype(np.float32) for each in update.slots]
    return update._replace(var=var, slots=slots, grad=update.grad.astype(np.float32))


def narrow(exact: Update) -> Written:
    """Returns what a variable and its slots are rounded to."""
    arrays = [each.reshape(-1) for each in (exact.var, *exact.slots)]
    numbers = np.arange(exact.var.size, dtype=np.uint64)
    return [each.reshape(exact.var.shape) for each in round_at_random(arrays, numbers, KEY)]


def check(update: Update, exact: Update) -> None:
    """Float32 results that differ in their last digits are rounded to other neighbours at times."""
    for mine, theirs in zip((update.var, *update.slots), narrow(exact), strict=True):
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        step = float(ml_dtypes.finfo(BFLOAT16).eps)
        np.testing.assert_allclose(a, b, rtol=step, atol=1e-6)
        assert (a != b).mean() <= 0.01 if a.size > 100 else (a != b).sum() <= 1


@every_backend
@every_rule
@pytest.mark.one_in(2)
def test_dense_updates_are_those_of_float32_that_are_rounded(
    backend: str, rule: UpdateRule
) -> None:
    arrays = Arrays(rule, "bfloat16")
    updates = [arrays.update(*shape) for shape in SHAPES]
    # The variable, the gradient or a slot begins in the middle of a pack, or has columns.
    updates[-4] = updates[-4]._replace(var=misaligned(updates[-4].var))
    updates[-3] = updates[-3]._replace(grad=misaligned(updates[-3].grad))
    updates[-2] = updates[-2]._replace(slots=[misaligned(each) for each in updates[-2].slots])
    exact = [wide(update) for update in updates]
    apply_dense(BACKENDS["plain"](), rule, exact, scalars_for("plain", rule))
    apply_dense(BACKENDS[backend](), rounding(rule), updates, given(backend, rule))
    for update, theirs in zip(updates, exact, strict=True):
        check(update, theirs)


@every_backend
@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize(
    "rule", [each for each in ELEMENTWISE if not each.sums], ids=lambda r: r.name
)
@pytest.mark.one_in(3)
def test_sparse_updates_are_those_of_float32_that_are_rounded(
    backend: str, rule: UpdateRule, all_rows: bool
) -> None:
    arrays, rng = Arrays(rule, "bfloat16"), np.random.default_rng(1)
    for width, index in ((1, np.int32), (8, np.int64), (9, np.int32), (40, np.int32)):
        rows = (rng.zipf(1.4, 240) % 50).astype(index)
        update = arrays.update(50, width, grad=arrays.gradient(240, width), rows=rows)
        exact, before = wide(update), copy_of(update)
        apply_sparse(BACKENDS["plain"](), rule, exact, scalars_for("plain", rule), all_rows)
        apply_sparse(BACKENDS[backend](), rounding(rule), update, given(backend, rule), all_rows)
        check(update, exact)
        if not all_rows:
            others = np.setdiff1d(np.arange(50), rows)
            np.testing.assert_array_equal(update.var[others], before.var[others])


@every_backend
@pytest.mark.parametrize("base", [BY_NAME["ams_grad"], four_slots], ids=lambda rule: rule.name)
def test_an_average_in_float32_follows_what_is_rounded(backend: str, base: UpdateRule) -> None:
    """The bits are those of a step without it, and then of a pass of its own."""
    rule = averaged(base)
    scalars = given(backend, rule)
    arrays = Arrays(rule, "bfloat16")
    made = [arrays.update(*shape) for shape in SHAPES]
    updates = [
        each._replace(slots=[each.slots[0].astype(np.float32), *each.slots[1:]]) for each in made
    ]
    apart = [copy_of(update) for update in updates]
    apply_dense(BACKENDS[backend](), rounded(rule), updates, scalars)
    own = [each._replace(slots=each.slots[1:]) for each in apart]
    without = {name: value for name, value in scalars.items() if name != AVERAGE_WEIGHT}
    apply_dense(BACKENDS[backend](), rounded(base), own, without)
    averages = [Update(each.slots[0], each.var.astype(np.float32), [], None) for each in apart]
    weight = {AVERAGE_WEIGHT: scalars[AVERAGE_WEIGHT]}
    apply_dense(BACKENDS[backend](), moving_average, averages, weight)
    for mine, theirs in zip(updates, apart, strict=True):
        for array, expected in zip(
            (mine.var, *mine.slots), (theirs.var, *theirs.slots), strict=True
        ):
            assert array.tobytes() == expected.tobytes()


def exact_case(shape: tuple[int, ...], rows: Any = None) -> tuple[Update, dict[str, Any]]:
    """Returns an update of gradient descent in which float32 makes no error."""
    rng = np.random.default_rng(3)
    var = rng.normal(size=shape).astype(BFLOAT16)
    at = shape if rows is None else (rows.size, *shape[1:])
    grad = rng.integers(-8, 8, at).astype(BFLOAT16)
    return Update(var, grad, [], rows), {"learning_rate": np.float32(2.0**-12), **KEY}


@every_backend
@pytest.mark.parametrize("shape", [(3,), (5000,), (41, 13), (300, 8)])
def test_every_backend_writes_the_same_bits(backend: str, shape: tuple[int, ...]) -> None:
    update, scalars = exact_case(shape)
    new = update.var.astype(np.float32) - scalars["learning_rate"] * update.grad.astype(np.float32)
    expected = narrow(update._replace(var=new))[0]
    apart = copy_of(update)._replace(var=misaligned(update.var))
    apply_dense(BACKENDS[backend](), rounded(SGD), [update, apart], scalars)
    assert update.var.tobytes() == apart.var.tobytes() == expected.tobytes()
    assert (expected != new.astype(BFLOAT16)).mean() > 0.01


@every_backend
@pytest.mark.parametrize("width", [1, 8, 13])
@pytest.mark.parametrize("all_rows", [False, True])
def test_rows_get_the_bits_of_the_dense_update(backend: str, width: int, all_rows: bool) -> None:
    """Of each table of several, too: an element's number is that in its own variable."""
    rows = np.array([40, 3, 11, 19])
    sparse, scalars = exact_case((41, width), rows)
    dense = copy_of(sparse)._replace(grad=np.zeros((41, width), BFLOAT16))
    dense.grad[rows] = sparse.grad
    tables = [copy_of(sparse), copy_of(sparse)]
    mine = BACKENDS[backend]()
    apply_dense(mine, rounded(SGD), [dense], scalars)
    apply_sparse(mine, rounded(SGD), sparse, scalars, all_rows)
    assert sparse.var.tobytes() == dense.var.tobytes()
    named = [
        SparseUpdate(mine.plan_dense([Target(each.var, [])]), each.grad, rows) for each in tables
    ]
    mine.apply_sparse(rounded(SGD), named, [scalars], other_rows=rounded(SGD) if all_rows else None)
    for each in tables:
        assert each.var.tobytes() == dense.var.tobytes()


@every_backend
def test_nan_infinity_and_what_rounds_to_them(backend: str) -> None:
    last = np.float32(np.uint32(0x7F7F0000).view(np.float32))
    var = np.array([np.nan, np.inf, -np.inf, last, -last, last, 0.0, -0.0] * 20, BFLOAT16)
    # Less than half of the distance to what would be the next number, and more.
    grad = np.array([0, 0, 0, -0.25, 0.25, -0.75, 0, 0] * 20, np.float32) * np.float32(2.0**120)
    update = Update(var, grad.astype(BFLOAT16), [])
    apply_dense(
        BACKENDS[backend](), rounded(SGD), [update], {"learning_rate": np.float32(1), **KEY}
    )
    expected = np.array([np.nan, np.inf, -np.inf, last, -last, np.inf, 0.0, -0.0] * 20, BFLOAT16)
    np.testing.assert_array_equal(var.astype(np.float32), expected.astype(np.float32))
