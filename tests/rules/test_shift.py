"""Which rules step a variable alike wherever it is, and how they say so to C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from every_optimizer import CONFIGURATIONS, make, rules_of_missed_steps

import gpuopt
from gpuopt.optimizers.adam import adam
from gpuopt.optimizers.add_sign import add_sign
from gpuopt.optimizers.ftrl import ftrl
from gpuopt.optimizers.nadam import nadam
from gpuopt.optimizers.power_sign import power_sign
from gpuopt.rules.averaged import averaged
from gpuopt.rules.clipped import clipped
from gpuopt.rules.decayed import decayed
from gpuopt.rules.scaled import scaled
from gpuopt.rules.shift import Shift, cpp_type

ANYWHERE, NOWHERE = Shift(None), None


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        *((rule, ANYWHERE) for rule in (adam, nadam, add_sign, power_sign)),
        (decayed(adam), Shift("weight_decay")),
        (clipped(adam), ANYWHERE),
        (scaled(decayed(nadam)), Shift("weight_decay")),
        (decayed(clipped(adam)), Shift("weight_decay")),
        (averaged(adam), NOWHERE),
        (ftrl, NOWHERE),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_our_rules(rule: Any, expected: Shift | None) -> None:
    assert rule.shift == expected


def test_a_shift_is_what_each_exported_rule_does() -> None:
    """By numbers: a step from a sum is the step from one part, and what is left of the other."""
    rng = np.random.default_rng(0)
    shifting = 0
    for rule in dict.fromkeys(make(name, arguments).rule for _, name, arguments in CONFIGURATIONS):
        decays = [] if "weight_decay" in rule.scalars else [decayed(rule)]
        for each in (rule, *decays, clipped(rule)):
            if each.shift is None or each.computed:
                continue
            shifting += 1
            grad, var, rest = rng.normal(size=(3, 50))
            slots = rng.uniform(0.5, 1, (len(each.slots), 50))
            scalars = dict(zip(each.scalars, rng.uniform(0.1, 0.9, len(each.scalars)), strict=True))
            stepped = []
            for start in (var + rest, rest):
                own = start.copy()
                with np.errstate(all="ignore"):  # of numbers that no training has: NaN in both
                    each.apply(own, grad, *slots.copy(), **scalars)
                stepped.append(own)
            decay = 0.0 if each.shift.decay is None else scalars[each.shift.decay]
            np.testing.assert_allclose(
                stepped[0], stepped[1] + (1 - decay) * var, rtol=0, atol=1e-12, err_msg=each.name
            )
    assert shifting > 30


def test_rules_of_optimizers_whose_rows_catch_up_are_shifts() -> None:
    assert all(rule.shift is not None for rule in rules_of_missed_steps())


def _adds(var, grad, m, *, rate, decay):
    m += (1 - decay) * (grad - m)
    np.add(var, -rate * np.where(m > 0, m, 0) ** 2, out=var)


def _decays_after_it_is_read(var, grad, m, *, rate, decay):
    decayed = var * decay
    m[...] = grad
    var -= rate * m
    var -= decayed


def _changes_elements(var, grad, m, *, rate, decay):
    var[...] -= rate * grad


def _stores_the_difference(var, grad, m, *, rate, decay):
    var[...] = var - rate * grad


SHIFTS: dict[Callable[..., None], Shift] = {
    _adds: Shift(None),
    _decays_after_it_is_read: Shift("decay"),
    _changes_elements: Shift(None),
    _stores_the_difference: Shift(None),
}


@pytest.mark.parametrize("apply", SHIFTS, ids=lambda apply: apply.__name__)
def test_rules_of_users_that_shift(apply: Callable[..., None]) -> None:
    assert gpuopt.update_rule(apply).shift == SHIFTS[apply]


def _by_a_branch(var, grad, m, *, rate, decay):
    if rate > 100:
        var -= decay * var
    var -= rate * grad


def _by_a_scaled_decay(var, grad, m, *, rate, decay):
    var -= rate * decay * var
    var -= rate * grad


def _by_a_scalar_that_is_changed(var, grad, m, *, rate, decay):
    decay *= 2
    var -= decay * var
    var -= rate * grad


def _by_a_decay_that_is_changed(var, grad, m, *, rate, decay):
    part = decay * var
    part *= 2
    var -= part + rate * grad


def _by_two_decays(var, grad, m, *, rate, decay):
    var -= decay * var
    var -= rate * var
    var -= rate * grad


def _by_growth(var, grad, m, *, rate, decay):
    var += decay * var
    var -= rate * grad


def _by_its_sign(var, grad, m, *, rate, decay):
    var -= rate * (grad + decay * np.sign(var))


def _by_a_slot(var, grad, m, *, rate, decay):
    m[...] = var
    var -= rate * grad


def _by_a_copy(var, grad, m, *, rate, decay):
    np.copyto(m, var)
    var -= rate * grad


def _by_a_choice(var, grad, m, *, rate, decay):
    var -= rate * np.where(np.abs(var) > 1, grad, 0)


def _by_itself(var, grad, m, *, rate, decay):
    var -= var
    var -= rate * grad


def _by_whatever_can_be_done(var, grad, m, *, rate, decay):
    try:
        m[...] = var
    except Exception:
        m[...] = grad
    var -= rate * grad


def _by_its_type(var, grad, m, *, rate, decay):
    if isinstance(var, np.ndarray):
        m[...] = var
    var -= rate * grad


READERS = [each for name, each in globals().copy().items() if name.startswith("_by_")]


@pytest.mark.parametrize("apply", READERS, ids=lambda apply: apply.__name__)
def test_rules_that_may_read_the_variable_are_no_shifts(apply: Callable[..., None]) -> None:
    rule = gpuopt.update_rule(apply)
    assert rule.shift is None
    assert cpp_type(rule.shift, rule.scalars) == "gpuopt::Shift<false, -1>"
