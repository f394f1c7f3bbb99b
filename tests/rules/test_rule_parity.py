"""The C++ of every rule computes what its numpy function computes. Needs g++, not a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from every_optimizer import update_rules
from rule_library import REALS, RuleLibrary

from gpuopt.rules.update_rule import MEAN_SQUARE, UpdateRule

pytestmark = [pytest.mark.value, pytest.mark.cxx]

RULES = update_rules()


@pytest.fixture(scope="module")
def compiled_rules() -> RuleLibrary:
    return RuleLibrary(RULES)


@pytest.mark.parametrize("power", [0.5, 0.7], ids=["root", "power"])
@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_cuda_rule_computes_what_its_numpy_form_computes(
    compiled_rules: RuleLibrary, rule: UpdateRule, real: str, power: float
) -> None:
    dtype = REALS[real]
    rng = np.random.default_rng(len(rule.name))
    size = 257
    var, grad = rng.normal(size=(2, size)).astype(dtype)
    slots = [rng.uniform(1, 2, size).astype(dtype) for _ in rule.slots]
    # Zeros, ties with a threshold, and what must pass through.
    grad[:4] = 0
    var[2:6] = 0
    grad[-3:] = [np.inf, -np.inf, np.nan]
    scalars = {name: dtype(rng.uniform(0.1, 0.9)) for name in rule.scalars}
    if "power" in scalars:
        scalars["power"] = dtype(power)
    # A decision is made one way with the one power, and the other way with the other.
    flags = [name for name in scalars if name.startswith("is_")]
    scalars |= dict.fromkeys(flags, dtype(power == 0.5))

    expected = [array.copy() for array in (var, *slots)]
    with np.errstate(all="ignore"):
        # Rows of one element.
        of_rows = {MEAN_SQUARE: grad * grad} if rule.row_slots else {}
        rule.apply(expected[0], grad, *expected[1:], **{**scalars, **of_rows})
    compiled_rules.run(rule, real, [var, *slots], grad, scalars)

    for got, want in zip((var, *slots), expected, strict=True):
        # Both sides round each operation once, pow aside; inputs are of size 1.
        tolerance = 16 * np.finfo(dtype).eps
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
