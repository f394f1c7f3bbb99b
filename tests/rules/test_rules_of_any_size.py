"""A user's rule computes the same for a variable of any size, or is refused for any by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import using
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.optimizers.base import RuleOptimizer

pytestmark = pytest.mark.value

NUM_ROWS = 300

# What a rule adds to a slot: types other than the variable's on the way, numbers of Python's.
COMPUTE: dict[str, Callable[[Any], Any]] = {
    "truth values": np.isfinite,
    "integers": lambda grad: 2 + np.abs(np.isfinite(grad)),
    "an integer's quotient": lambda grad: (grad > 0) / (3 - (grad < 0.5)),
    "integers divided": lambda grad: (7 * (grad > 0)) // 2,
    "an integer's power": lambda grad: (2 + (grad > 0)) ** 3,
    "bits": lambda grad: ~(grad > 0) ^ (grad > 0.5),
    "shifted bits": lambda grad: (grad > 0) << 2,
    "a choice": lambda grad: np.where(grad > 0, 1, -2),
    "a choice of numbers": lambda grad: np.where(grad > 0, grad, 2.5),
    "bounds": lambda grad: np.clip(grad, -1, 1) + np.clip(7 * (grad > 0), 1, 5),
    "rounding": lambda grad: np.round(grad) + np.rint(4 * grad),
    "float64": lambda grad: grad * np.float64(1 / 3),
    "float64 and integers": lambda grad: np.float64(0.1) * (grad > 0) + 1,
    "a number of truth": lambda grad: True + (grad > 0),
    "a constant": lambda grad: 3,
    "a root": lambda grad: np.abs(grad) ** 0.5 + (2 + (grad > 0)) ** 2,
}

# What is none of elements alone, and what is said of it.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a sum": (np.sum, r"np\.sum"),
    "a sum by a method": (lambda grad: grad.sum(), r"array\.sum"),
    "an order": (np.sort, r"np\.sort"),
    "a decision": (lambda grad: grad if grad[0] > 0 else -grad, r"array\[0\]"),
    "a decision by all": (lambda grad: grad if np.all(grad > 0) else -grad, r"np\.all"),
    "rows by a mask": (lambda grad: grad[grad > 0], r"array\[an array\]: use np.where"),
    "no element": (lambda grad: np.add(grad, 1, where=False), r"np\.add with where="),
    "an array of its own": (lambda grad: grad * np.arange(4), r"an array of shape \(4,\)"),
}


def optimizer_of(compute: Callable[[Any], Any], **common: Any) -> gpuopt.Optimizer:
    @gpuopt.update_rule
    def users(var: Any, grad: Any, m: Any, n: Any, *, rate: Any) -> None:
        m[...] = compute(grad)
        n += compute(grad)
        var -= rate * (m + n) * grad

    class Users(RuleOptimizer):
        rule = users

        def __init__(self) -> None:
            super().__init__(common, rate=0.5)

    return Users()


def make_groups() -> list[ParameterGroup]:
    return [ParameterGroup("small", rate=0.25)]


def train(compute: Callable[[Any], Any], limits: CpuLimits, *, grouped: bool) -> list[np.ndarray]:
    """Makes two steps of variables that are updated together, of a large one and of a table.

    Some of the variables are not contiguous, of 16 bits, or of float64.
    """
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    optimizer = optimizer_of(compute, **({"groups": make_groups()} if grouped else {}))
    smalls = [Variable(draw(size), name=f"{'small' * (size > 4)}{size}") for size in (3, 5, 7)]
    others = [
        Variable(draw(2_000)),
        Variable(draw(20, 30)[:, ::2], copy=False),
        Variable(draw(50).astype(np.float16)),
        Variable(draw(60).astype(np.float64)),
    ]
    table = Variable(draw(NUM_ROWS, 5))
    dense = [(draw(*variable.shape).astype(variable.dtype), variable) for variable in smalls]
    dense += [(draw(*variable.shape).astype(variable.dtype), variable) for variable in others]
    rows = IndexedSlices(draw(40, 5), rng.integers(0, NUM_ROWS, 40))
    with using(Device.cpu, CpuBackend(limits)):
        for _ in range(2):
            optimizer.apply_gradients([*dense, (rows, table)])
    variables = [*smalls, *others, table]
    slots = [optimizer.get_slot(each, name) for each in variables for name in "mn"]
    return [each.numpy() for each in (*variables, *slots)]


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "groups"])
@pytest.mark.parametrize("name", COMPUTE)
@pytest.mark.one_in(8)
def test_a_rule_computes_the_same_bits_for_small_and_large_variables(
    name: str, grouped: bool
) -> None:
    compute = COMPUTE[name]
    small, large = (
        train(compute, limits, grouped=grouped)
        for limits in (CpuLimits(), CpuLimits(large_elements=0, elements_per_thread=500))
    )
    for got, expected in zip(large, small, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_is_not_of_elements_is_refused_when_it_is_made(name: str) -> None:
    compute, words = REFUSED[name]
    with pytest.raises(
        TypeError, match=rf"^users: tests/rules/test_rules_of_any_size.py:\d+: .*{words}"
    ):
        optimizer_of(compute)
