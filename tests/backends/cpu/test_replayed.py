"""A replayed rule computes what its function does, also for several groups at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from every_optimizer import update_rules

import gpuopt
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.replayed import form_of_parts, replayed_rules
from gpuopt.rules.update_rule import UpdateRule

pytestmark = pytest.mark.value

LENGTHS = (67, 1, 130, 5)
OF_PARTS = (2, 0, 1, 2)


def compare_with_each_alone(
    rule: UpdateRule,
    scalars: Sequence[Any],
    *,
    zero_grad: bool = False,
    is_joined: bool | None = True,
) -> None:
    """Compares bits: of a form for each group, and of one for parts of all groups.

    Args:
        rule: The rule.
        scalars: Of each group.
        zero_grad: See `replayed_rules`.
        is_joined: Whether there is a form for all; None where that is not looked at.
    """
    real = np.dtype(type(next(iter(scalars[0].values()))))
    rng = np.random.default_rng(len(rule.name))
    size = sum(LENGTHS)
    var, grad = rng.normal(size=(2, size)).astype(real)
    grad[:4] = [0, np.inf, -np.inf, np.nan]
    if zero_grad:
        grad[:] = 0
    given = [var, *[rng.uniform(1, 2, size).astype(real) for _ in rule.slots]]

    def update(form: Any, part: slice, written: list[np.ndarray]) -> None:
        of_part = [array[part] for array in written]
        is_replayed = not isinstance(form, PlainRule)
        scratch = [np.full(of_part[0].size, 7, dtype) for dtype in form.scratch_dtypes]
        with np.errstate(all="ignore"):
            form.apply(of_part, None if is_replayed and zero_grad else grad[part], scratch)

    forms = replayed_rules(rule, real, scalars, zero_grad=zero_grad)
    ends = np.cumsum(LENGTHS)
    parts = [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]
    expected, apart, joined = ([array.copy() for array in given] for _ in range(3))
    for part, group in zip(parts, OF_PARTS, strict=True):
        update(PlainRule(rule, scalars[group]), part, expected)
        update(forms[group], part, apart)
    whole = form_of_parts(forms, OF_PARTS, LENGTHS)
    assert is_joined is None or (whole is not None) == is_joined
    if whole is not None:
        update(whole, slice(None), joined)
    for i, want in enumerate(expected):
        np.testing.assert_array_equal(apart[i], want)
        if whole is not None:
            np.testing.assert_array_equal(joined[i], want)


@pytest.mark.parametrize("zero_grad", [False, True], ids=["grad", "zero_grad"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "rule", [rule for rule in update_rules() if not rule.computed], ids=lambda rule: rule.name
)
def test_a_rule_for_groups_computes_the_bits_of_each_alone(
    rule: UpdateRule, dtype: Any, zero_grad: bool
) -> None:
    rng = np.random.default_rng(len(rule.name))
    flags = {name: dtype(1) for name in rule.scalars if name.startswith("is_")}
    scalars = [
        {name: dtype(rng.uniform(0.1, 0.9)) for name in rule.scalars} | flags for _ in range(3)
    ]
    compare_with_each_alone(rule, scalars, zero_grad=zero_grad)


def rule_of(compute: Callable[[Any, Any], Any]) -> UpdateRule:
    def rule(var: Any, grad: Any, *, rate: Any, shift: Any) -> None:
        var -= rate * compute(grad, shift)

    return gpuopt.update_rule(rule)


def scalars_of(*shifts: float) -> list[dict[str, Any]]:
    """Of groups with rates of their own."""
    return [
        {"rate": np.float32(0.1 * (i + 1)), "shift": np.float32(x)} for i, x in enumerate(shifts)
    ]


@pytest.mark.parametrize(
    "compute",
    [
        lambda grad, shift: grad + 2.0**shift,
        lambda grad, shift: grad + shift**0.3,
        lambda grad, shift: grad + shift**shift,
        lambda grad, shift: np.abs(grad) ** shift,
        lambda grad, shift: np.clip(grad, -shift, np.sqrt(shift)),
        lambda grad, shift: np.where(grad > shift, -shift, grad),
        lambda grad, shift: grad + (shift if shift > 0 else 7),
        lambda grad, shift: grad * max(shift, 1e-3) // 1,
        lambda grad, shift: grad + shift.astype(np.float64),
        lambda grad, shift: grad + np.clip(shift, 0, 1),
        lambda grad, shift: grad + np.where(shift > 1, shift, 0),
        lambda grad, shift: grad + round(shift),
        lambda grad, shift: grad * np.array(2, np.float32) + np.array(3, np.float32) * shift,
    ],
)
def test_arithmetic_among_scalars_is_that_of_each_group(compute: Any) -> None:
    compare_with_each_alone(rule_of(compute), scalars_of(0.3, 0.7, 1.9))


@pytest.mark.parametrize(
    "compute",
    [
        lambda grad, shift: grad + shift if shift < 1 else grad,
        lambda grad, shift: np.abs(grad) ** shift,  # a root, and another power
    ],
)
def test_groups_that_decide_otherwise_are_updated_apart(compute: Any) -> None:
    compare_with_each_alone(rule_of(compute), scalars_of(0.5, 0.7, 1.9), is_joined=False)


def test_groups_of_equal_scalars_decide_alike_whatever_a_rule_asks() -> None:
    rule = rule_of(lambda grad, shift: grad + np.sqrt(shift) if shift < 1 else grad)
    compare_with_each_alone(rule, scalars_of(0.5, 0.5, 0.5))


def test_zeros_of_two_signs_are_two_scalars() -> None:
    compare_with_each_alone(rule_of(lambda grad, shift: 1 / shift), scalars_of(0.0, -0.0, 0.0))


STATEMENTS = (
    "{a}[...] = {b}",
    "{a} += {b} * {c}",
    "{a} -= rate * {b}",
    "{a} *= shift",
    "{a}[...] = np.where({b} > {c}, {c}, grad)",
    "{a}[...] = np.clip({b}, -shift, {c} + 1)",
    "{a}[...] = np.maximum({b}, 0.5) / (1 + {c} * {c})",
    "{a}[...] = {b} + grad if rate < shift else {c}",
    "{a}, {b} = {b}, {a}",
    "{a} = {b} + {c}",
    "{a} = np.sqrt(np.abs({b}))",
    "{a}[...] = {b} > rate",
    "{a}[...] = 2.0",
)


@pytest.mark.parametrize("seed", range(60))
def test_random_statements_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lines = ["var -= grad"]
    for _ in range(rng.integers(2, 9)):
        a, b, c = rng.choice(["var", "first", "second"], 3)
        lines.append(rng.choice(STATEMENTS).format(a=a, b=b, c=c))
    names: dict[str, Any] = {"np": np}
    head = "def rule(var, grad, first, second, *, rate, shift):"
    exec("\n    ".join([head, *lines]), names)
    drawn = rng.uniform(0.1, 0.9, (3, 2)).astype(np.float32)
    scalars = [{"rate": rate, "shift": shift} for rate, shift in drawn]
    is_joined = None if " if " in "".join(lines) else True
    compare_with_each_alone(
        gpuopt.update_rule(names["rule"]), scalars, zero_grad=seed % 3 == 0, is_joined=is_joined
    )
