"""A traced rule's C++ computes what its numpy function computes, whatever the rule is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_library import REALS, RuleLibrary

import gpuopt
from gpuopt.rules.functions import UFUNCS
from gpuopt.rules.update_rule import UpdateRule

pytestmark = [pytest.mark.value, pytest.mark.cxx]

# numpy's loops and the C library's functions may round their last digits each in their own way.
INEXACT = re.compile("arc|cos|sin|tan|exp|log|power|cbrt|hypot")


def compare(
    library: RuleLibrary, rule: UpdateRule, scalars: Mapping[str, float], ulps: int = 0
) -> None:
    """Compares a step of many numbers: zeros of both signs, infinities and NaN among them."""
    for real, dtype in REALS.items():
        rng = np.random.default_rng(len(rule.name))
        special = np.array([0.0, -0.0, 1, -1, 0.5, 2, np.inf, -np.inf, np.nan], dtype)
        arrays = [
            np.concatenate([rng.normal(size=200).astype(dtype) * 3, *special_values])
            for special_values in ([np.repeat(special, 9)], [np.tile(special, 9)])
        ]
        given = {name: dtype(value) for name, value in scalars.items()}
        got, want = arrays[0].copy(), arrays[0].copy()
        with np.errstate(all="ignore"):
            rule.apply(want, arrays[1], **given)
        library.run(rule, real, [got], arrays[1], given)
        if ulps:
            np.testing.assert_allclose(got, want, rtol=ulps * np.finfo(dtype).eps, atol=0)
        else:
            np.testing.assert_array_equal(got, want, err_msg=f"{rule.name} {real}")


def calls(name: str) -> UpdateRule:
    """Returns a rule that calls a function of the table."""
    ufunc = getattr(np, name)
    takes_floats = any(each.startswith("f") for each in ufunc.types)

    def apply(var: Any, grad: Any) -> None:
        given = (var, grad) if takes_floats else (2 + (var > 0), 3 - (grad > 0))
        if not takes_floats and name in ("invert", "bitwise_xor"):
            given = (var > 0, grad > 0)
        var[...] = ufunc(*given[: ufunc.nin])

    apply.__name__ = name
    return gpuopt.update_rule(apply)


def test_every_function_of_the_table_is_numpys() -> None:
    rules = [calls(name) for name in UFUNCS]
    library = RuleLibrary(rules)
    for rule in rules:
        compare(library, rule, {}, ulps=4 if INEXACT.search(rule.name) else 0)


def decides(var: Any, grad: Any, *, a: Any, b: Any, c: Any) -> None:
    step = grad * a
    if a > 0.5:
        step = step + b * var
        if b < 0.5:
            step = np.sqrt(np.abs(step))
    elif c:
        step = np.abs(step) ** c
    # A difference would make more of what powers round.
    var *= step if b > c else 2 * step


def goes_by_types(var: Any, grad: Any, *, a: Any, b: Any, c: Any) -> None:
    wide = grad * np.float64(0.1) + a
    var -= np.where(grad > b, wide, (grad > 0) * 3) / (2 + (var < c))


def has_names_of_cpp(var: Any, grad: Any, *, double: Any, NAN: Any, β: Any) -> None:
    var -= double * grad + NAN * β


@pytest.mark.parametrize("apply", [decides, goes_by_types, has_names_of_cpp])
def test_every_way_of_a_rule_is_numpys(apply: Callable[..., None]) -> None:
    rule = gpuopt.update_rule(apply)
    library = RuleLibrary([rule])
    for numbers in itertools.product((0.0, 0.3, 0.7), repeat=3):
        compare(library, rule, dict(zip(rule.scalars, numbers, strict=True)), ulps=4)


def test_no_element_takes_both_ways_of_a_root_or_a_power() -> None:
    text = gpuopt.FtrlOptimizer.rule.cpp
    powers = [line for line in text.splitlines() if "numpy::power" in line]
    assert powers
    assert all("? (numpy::sqrt" in line for line in powers)


def test_a_rule_with_more_decisions_than_eight_is_refused() -> None:
    with pytest.raises(TypeError, match="more than 8 decisions by scalars"):

        @gpuopt.update_rule
        def undecided(var: Any, grad: Any, *, rate: Any) -> None:
            for bound in range(9):
                if rate > bound:
                    var -= rate * grad


def test_the_guide_lists_every_function() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/rules.md").read_text()
    [listed] = re.findall(r"and similar ones, and these:\n\n(.*?)\.\n\n", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(UFUNCS)
