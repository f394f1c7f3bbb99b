"""Backends write a 16-bit copy beside float32 master copies: in each update, and of what it writes.

Master copies and slots are compared with the same update without anything beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME
from every_backend import (
    BACKENDS,
    RULES,
    every_backend,
    every_rule,
    misaligned,
    plan_beside,
    scalars_for,
)
from kernel_updates import Arrays, Update, check, copy_of

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import SparseUpdate
from gpuopt.rules.split import joined, split
from gpuopt.rules.update_rule import UpdateRule

Copies = list[np.ndarray[Any, Any]]

every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def plan_of(backend: Backend, updates: list[Update], copies: Copies) -> Any:
    targets = [Target(update.var, update.slots) for update in updates]
    return plan_beside(backend, targets, copies)


def rounded(updates: list[Update], dtype: str) -> Copies:
    return [update.var.astype(DTYPES_BY_NAME[dtype]) for update in updates]


def check_copies(copies: Copies, updates: list[Update]) -> None:
    for copy, update in zip(copies, updates, strict=True):
        np.testing.assert_array_equal(copy, update.var.astype(copy.dtype))


@every_backend
@every_dtype
@every_rule
@pytest.mark.one_in(2)
def test_dense_updates_write_copies(backend: str, rule: UpdateRule, dtype: str) -> None:
    arrays, gradients = Arrays(rule, "float32"), Arrays(rule, dtype)
    shapes = [(1,), (7,), (64,), (0,), (5, 3), (40, 30), (2000, 5), ()]
    shapes += [(40, 13)] * 5
    updates = [arrays.update(*shape, grad=gradients.gradient(*shape)) for shape in shapes]
    copies = rounded(updates, dtype)
    # The copy, the master, the gradient or a slot begins in the middle of a pack, or has columns.
    copies[-5] = misaligned(copies[-5])
    updates[-4] = updates[-4]._replace(var=misaligned(updates[-4].var))
    updates[-3] = updates[-3]._replace(grad=misaligned(updates[-3].grad))
    updates[-2] = updates[-2]._replace(slots=[misaligned(each) for each in updates[-2].slots])
    copies[-1] = np.asfortranarray(copies[-1])
    exact = [copy_of(update) for update in updates]
    alone, scalars = BACKENDS["plain"](), scalars_for("plain", rule)
    alone.apply_dense(rule, plan_of(alone, exact, []), [each.grad for each in exact], [scalars])
    mine = BACKENDS[backend]()
    plan = plan_of(mine, updates, copies)
    scalars = scalars_for(backend, rule)
    mine.apply_dense(rule, plan, [each.grad for each in updates], [scalars])
    check(updates, exact)
    check_copies(copies, updates)


@every_backend
@every_dtype
@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("rule", [each for each in RULES if not each.sums], ids=lambda r: r.name)
@pytest.mark.one_in(3)
def test_sparse_updates_write_rows_of_copies(
    backend: str, rule: UpdateRule, all_rows: bool, dtype: str
) -> None:
    if all_rows and rule.computed:
        pytest.skip("such a rule has no step without a gradient")
    arrays, gradients = Arrays(rule, "float32"), Arrays(rule, dtype)
    rng = np.random.default_rng(1)
    mine, alone = BACKENDS[backend](), BACKENDS["plain"]()
    other_rows = rule if all_rows else None
    for width, index in ((1, np.int32), (8, np.int64), (9, np.int32), (40, np.int32)):
        rows = (rng.zipf(1.4, 240) % 50).astype(index)
        update = arrays.update(50, width, grad=gradients.gradient(240, width), rows=rows)
        copies, exact = rounded([update], dtype), copy_of(update)
        named = SparseUpdate(plan_of(alone, [exact], []), exact.grad, rows)
        given = scalars_for("plain", rule)
        alone.apply_sparse(rule, [named], [given], other_rows=other_rows)
        named = SparseUpdate(plan_of(mine, [update], copies), update.grad, rows)
        mine.apply_sparse(rule, [named], [scalars_for(backend, rule)], other_rows=other_rows)
        check([update], [exact], sum_error=8)
        check_copies(copies, [update])


@every_backend
def test_a_row_without_a_gradient_keeps_its_copy(backend: str) -> None:
    rule = RULES[1]
    update = Arrays(rule, "float32").update(20, 8, grad=np.ones((3, 8), np.float16))
    rows = np.array([4, 4, 9])
    marked = np.full((20, 8), 7, np.float16)
    mine = BACKENDS[backend]()
    named = SparseUpdate(plan_of(mine, [update], [marked]), update.grad, rows)
    mine.apply_sparse(rule, [named], [scalars_for(backend, rule)], other_rows=None)
    written = np.flatnonzero((marked != 7).any(axis=1))
    assert written.tolist() == [4, 9]


@every_backend
def test_several_tables_write_copies_together(backend: str) -> None:
    rule, mine = RULES[1], BACKENDS[backend]()
    arrays, gradients = Arrays(rule, "float32"), Arrays(rule, "bfloat16")
    rows = np.array([3, 0, 3, 7])
    updates = [arrays.update(h, 8, grad=gradients.gradient(4, 8), rows=rows) for h in (20, 9, 30)]
    copies = rounded(updates, "bfloat16")
    before = [update.var.copy() for update in updates]
    plans = [plan_of(mine, [u], [c]) for u, c in zip(updates, copies, strict=True)]
    named = [SparseUpdate(p, u.grad, rows) for p, u in zip(plans, updates, strict=True)]
    mine.apply_sparse(rule, named, [scalars_for(backend, rule)], other_rows=None)
    check_copies(copies, updates)
    for update, old in zip(updates, before, strict=True):
        assert sorted(set(np.flatnonzero((update.var != old).any(axis=1)))) == [0, 3, 7]


@every_backend
def test_a_gradient_in_the_memory_of_the_copy_is_read_first(backend: str) -> None:
    rule, mine = RULES[0], BACKENDS[backend]()
    copy = np.linspace(1, 2, 3000).astype(np.float16)
    var = copy.astype(np.float32)
    update = Update(var, copy, [])
    exact = Update(var.copy(), copy.copy(), [])
    scalars = {"learning_rate": np.float32(0.5)}
    alone = BACKENDS["plain"]()
    alone.apply_dense(rule, plan_of(alone, [exact], []), [exact.grad], [scalars])
    mine.apply_dense(rule, plan_of(mine, [update], [copy]), [copy], [scalars])
    check([update], [exact])
    check_copies([copy], [update])


@every_dtype
def test_a_plan_accepts_gradients_of_the_copies_type(dtype: str) -> None:
    update = Arrays(RULES[1], "float32").update(3, 4)
    plan = plan_of(BACKENDS["plain"](), [update], rounded([update], dtype))
    assert plan.accept([np.ones((3, 4), DTYPES_BY_NAME[dtype])]) is not None
    assert plan.accept([np.ones((3, 4), np.float32)]) is None


def split_updates(updates: list[Update]) -> tuple[list[Update], Copies]:
    """Returns the updates with variables that are upper halves, and the lower halves."""
    halves = [split(update.var) for update in updates]
    variables = [np.asarray(weights) for weights, _ in halves]
    given = [u._replace(var=var) for u, var in zip(updates, variables, strict=True)]
    return given, [np.asarray(rest) for _, rest in halves]


def check_joined(updates: list[Update], remainders: Copies, exact: list[Update]) -> None:
    got = [
        update._replace(var=np.asarray(joined(update.var, rest)))
        for update, rest in zip(updates, remainders, strict=True)
    ]
    check(got, exact, sum_error=8)


@every_backend
@every_rule
@pytest.mark.one_in(2)
def test_dense_updates_of_halves_are_those_of_the_whole(backend: str, rule: UpdateRule) -> None:
    arrays, gradients = Arrays(rule, "float32"), Arrays(rule, "bfloat16")
    shapes = [(1,), (7,), (64,), (0,), (5, 3), (40, 30), (2000, 5), ()]
    shapes += [(40, 13)] * 4
    exact = [arrays.update(*shape, grad=gradients.gradient(*shape)) for shape in shapes]
    updates, remainders = split_updates([copy_of(update) for update in exact])
    remainders[-4] = misaligned(remainders[-4])
    updates[-3] = updates[-3]._replace(var=misaligned(updates[-3].var))
    updates[-2] = updates[-2]._replace(slots=[misaligned(each) for each in updates[-2].slots])
    remainders[-1] = np.asfortranarray(remainders[-1])
    alone, mine = BACKENDS["plain"](), BACKENDS[backend]()
    scalars = scalars_for("plain", rule)
    alone.apply_dense(rule, plan_of(alone, exact, []), [each.grad for each in exact], [scalars])
    scalars = scalars_for(backend, rule)
    plan = plan_of(mine, updates, remainders)
    mine.apply_dense(rule, plan, [each.grad for each in updates], [scalars])
    check_joined(updates, remainders, exact)


@every_backend
@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("rule", [each for each in RULES if not each.sums], ids=lambda r: r.name)
@pytest.mark.one_in(3)
def test_sparse_updates_of_halves_are_those_of_the_whole(
    backend: str, rule: UpdateRule, all_rows: bool
) -> None:
    if all_rows and rule.computed:
        pytest.skip("such a rule has no step without a gradient")
    arrays, gradients = Arrays(rule, "float32"), Arrays(rule, "bfloat16")
    rng = np.random.default_rng(1)
    mine, alone = BACKENDS[backend](), BACKENDS["plain"]()
    other_rows = rule if all_rows else None
    for width, index in ((1, np.int32), (8, np.int64), (9, np.int32), (40, np.int32)):
        rows = (rng.zipf(1.4, 240) % 50).astype(index)
        exact = arrays.update(50, width, grad=gradients.gradient(240, width), rows=rows)
        [update], remainders = split_updates([copy_of(exact)])
        named = SparseUpdate(plan_of(alone, [exact], []), exact.grad, rows)
        given = scalars_for("plain", rule)
        alone.apply_sparse(rule, [named], [given], other_rows=other_rows)
        named = SparseUpdate(plan_of(mine, [update], remainders), update.grad, rows)
        mine.apply_sparse(rule, [named], [scalars_for(backend, rule)], other_rows=other_rows)
        check_joined([update], remainders, [exact])
