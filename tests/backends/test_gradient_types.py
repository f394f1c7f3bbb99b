"""Backends take gradients of another type than the variables', as the step sees fit.

A step is compared with the same step of float32 copies in numpy: what is written is that, rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME
from every_backend import (
    BACKENDS,
    BY_NAME,
    RULES,
    every_backend,
    every_rule,
    host,
    misaligned,
    scalars_for,
)
from every_kernel import MIXTURES
from kernel_updates import Arrays, Update, apply_dense, apply_sparse

from gpuopt.backends import Target
from gpuopt.rules.update_rule import UpdateRule

every_type = pytest.mark.parametrize(("var", "gradient"), MIXTURES)


def in_float32(update: Update) -> Update:
    var, grad, *slots = (
        np.array(each, np.float32) for each in (update.var, update.grad, *update.slots)
    )
    return Update(var, grad, slots, update.rows)


def check_rounded(got: Sequence[Update], exact: Sequence[Update]) -> None:
    for mine, theirs in zip(got, exact, strict=True):
        for a, b in zip((mine.var, *mine.slots), (theirs.var, *theirs.slots), strict=True):
            most = 4 * float(ml_dtypes.finfo(a.dtype).eps) * max(1.0, abs(b).max(initial=0))
            np.testing.assert_allclose(a.astype(np.float32), b, rtol=0, atol=most)


@every_backend
@every_type
@every_rule
@pytest.mark.one_in(8)
def test_dense_gradients_of_another_type(
    backend: str, rule: UpdateRule, var: str, gradient: str
) -> None:
    arrays, gradients = Arrays(rule, var), Arrays(rule, gradient)
    shapes = [(1,), (7,), (64,), (0,), (5, 3), (40, 30), (2000, 5), ()]
    updates = [arrays.update(*shape, grad=gradients.gradient(*shape)) for shape in shapes]
    # The variable, the gradient or a slot begins in the middle of a pack, or is not contiguous.
    odd = [arrays.update(40, 13, grad=gradients.gradient(40, 13)) for _ in range(5)]
    updates.append(odd[0]._replace(var=misaligned(odd[0].var)))
    updates.append(odd[1]._replace(grad=misaligned(odd[1].grad)))
    updates.append(odd[2]._replace(slots=[misaligned(each) for each in odd[2].slots]))
    updates.append(odd[3]._replace(var=np.asfortranarray(odd[3].var)))
    updates.append(odd[4]._replace(grad=np.broadcast_to(odd[4].grad[:1], (40, 13))))
    exact = [in_float32(update) for update in updates]
    apply_dense(host(), rule, exact, scalars_for("plain", rule))
    apply_dense(BACKENDS[backend](), rule, updates, scalars_for(backend, rule))
    check_rounded(updates, exact)


@every_backend
@every_type
@pytest.mark.parametrize(
    ("rule", "all_rows"),
    [
        pytest.param(rule, all_rows, id=f"{rule.name}-{all_rows}")
        for rule, all_rows in product(RULES, (False, True))
        if not (rule.sums or (all_rows and rule.computed))
    ],
)
@pytest.mark.one_in(16)
def test_sparse_gradients_of_another_type(
    backend: str, rule: UpdateRule, all_rows: bool, var: str, gradient: str
) -> None:
    arrays, gradients = Arrays(rule, var), Arrays(rule, gradient)
    rng = np.random.default_rng(1)
    mine = BACKENDS[backend]()
    for width, index in ((1, np.int32), (8, np.int64), (9, np.int32), (40, np.int32)):
        rows = (rng.zipf(1.4, 240) % 50).astype(index)
        update = arrays.update(50, width, grad=gradients.gradient(240, width), rows=rows)
        exact = in_float32(update)
        apply_sparse(host(), rule, exact, scalars_for("plain", rule), all_rows)
        apply_sparse(mine, rule, update, scalars_for(backend, rule), all_rows)
        check_rounded([update], [exact])


@every_backend
def test_a_gradient_of_another_type_may_begin_where_its_variable_does(backend: str) -> None:
    """Its elements are not those of the variable: what is written must not be read after that."""
    memory = np.linspace(1, 2, 4000, dtype=np.float32)
    var, grad = memory[:2000], memory.view(np.float16)[:2000]
    grad[:] = np.linspace(1, 2, 2000)
    exact = Update(var.copy(), grad.astype(np.float32), [])
    rule = BY_NAME["gradient_descent"]
    scalars = {"learning_rate": np.float32(0.5)}
    apply_dense(host(), rule, [exact], scalars)
    apply_dense(BACKENDS[backend](), rule, [Update(var, grad, [])], scalars)
    check_rounded([Update(var, grad, [])], [exact])


@every_backend
def test_gradients_may_have_another_type_in_each_step(backend: str) -> None:
    mine, var = BACKENDS[backend](), np.ones(3000, np.float32)
    plan = mine.plan_dense([Target(var, [])])
    scalars = [{"learning_rate": np.float32(0.5)}]
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float32, np.float16):
        gradient = np.ones(3000, dtype)
        mine.apply_dense(BY_NAME["gradient_descent"], plan, [gradient], scalars)
    np.testing.assert_array_equal(var, np.full(3000, -1.5))


def test_every_mixture_of_types_is_tested() -> None:
    sizes = {(DTYPES_BY_NAME[a].itemsize, DTYPES_BY_NAME[b].itemsize) for a, b in MIXTURES}
    assert sizes == {(2, 4), (4, 2), (2, 2)}
