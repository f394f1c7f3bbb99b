"""Updates in host memory give the same values at every size, in every form, on all threads."""

from __future__ import annotations

import logging
import math
import os
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from every_optimizer import optimizer_classes, update_rules
from row_sums import sums_of_rows
from textbook import adam

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.backends import backend_for, using
from gpuopt.backends.cpu import compiler as host_compiler
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.forms.compiled import CompiledRows, CompiledRule, compiled_groups
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.replayed import replayed_rules
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.row_groups import group_rows, sum_rows
from gpuopt.backends.cpu.threads import share_out
from gpuopt.device import Device
from gpuopt.rules.update_rule import UpdateRule, update_rule

RULES = update_rules()
LARGE = 3 * 2**18 + 5
CPU = backend_for(Device.cpu)


@pytest.mark.cxx
@pytest.mark.parametrize(("size", "is_compiled"), [(2**16 - 1, False), (2**16, True)])
def test_a_step_is_compiled_from_65536_elements_on(
    size: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: list[Any] = []
    monkeypatch.setattr(PlainRule, "apply", noting(plain, PlainRule.apply))
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    rng = np.random.default_rng(0)
    start, gradient = rng.normal(size=(2, size)).astype(np.float32)
    optimizer = gpuopt.AdamOptimizer(0.1)
    variables = [Variable(start[:5]), Variable(start[5:])]
    optimizer.apply_gradients([(gradient[:5], variables[0]), (gradient[5:], variables[1])])
    assert bool(plain) != is_compiled
    expected = adam(start, [(1, gradient)], learning_rate=0.1)["var"]
    found = np.concatenate([variable.numpy() for variable in variables])
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(np.float32).eps, atol=4e-7 * 0.1)


@pytest.mark.cxx
@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_are_compiled_from_16384_elements_on(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: list[Any] = []
    monkeypatch.setattr(PlainRule, "apply", noting(plain, PlainRule.apply))
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    rows = np.arange(256 if is_compiled else 255)
    table = Variable(np.zeros((1000, 64), np.float32))
    values = np.ones((len(rows), 64), np.float32)
    gpuopt.AdagradOptimizer(0.1).apply_gradients([(IndexedSlices(values, rows), table)])
    assert bool(plain) != is_compiled


@pytest.mark.parametrize("compiled", ["0", pytest.param("1", marks=pytest.mark.cxx)])
def test_all_rows_of_a_medium_table_are_moved_without_gradients(
    compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", compiled)
    rng = np.random.default_rng(0)
    start, gradient = rng.normal(size=(2, 1100, 64)).astype(np.float32)
    table, dense = Variable(start), Variable(start)
    sparse_adam, dense_adam = gpuopt.AdamOptimizer(0.1), gpuopt.AdamOptimizer(0.1)
    for rows in ([3, 1000], [7], [3]):
        alone = np.zeros_like(gradient)
        alone[rows] = gradient[rows]
        sparse_adam.apply_gradients([(IndexedSlices(gradient[rows], np.array(rows)), table)])
        dense_adam.apply_gradients([(alone, dense)])
    np.testing.assert_allclose(table.numpy(), dense.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compiled", ["0", pytest.param("1", marks=pytest.mark.cxx)])
@pytest.mark.parametrize(("small", "large"), [(1, 0), (10**9, 0), (10**9, 40)])
def test_rows_without_a_gradient_move_at_any_limits(
    small: int, large: int, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", compiled)
    limits = CpuLimits(small_elements=small, large_elements=large, elements_per_thread=64)
    dense = np.random.default_rng(small).normal(size=(12, 5)).astype(np.float32)
    rows, learning_rate = np.array([3, 11]), 0.125
    alone = np.zeros_like(dense)
    alone[rows] = dense[rows]
    with using(Device.cpu, CpuBackend(limits)):
        table, optimizer = Variable(np.ones_like(dense)), gpuopt.AdamOptimizer(learning_rate)
        optimizer.apply_gradients([(dense, table)])
        optimizer.apply_gradients([(IndexedSlices(dense[rows], rows), table)])
    steps = [(1, dense), (2, alone)]
    expected = adam(np.ones_like(dense), steps, learning_rate=learning_rate)["var"]
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


# A rule, replayed.


@pytest.mark.parametrize("zero_grad", [False, True], ids=["grad", "zero_grad"])
@pytest.mark.parametrize("power", [0.5, 0.7], ids=["root", "power"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
# Those with sums have new scalars for each variable in each step, and are not replayed.
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not rule.sums], ids=lambda rule: rule.name
)
@pytest.mark.one_in(2)
def test_a_replayed_rule_computes_the_same_bits(
    rule: UpdateRule, dtype: Any, power: float, zero_grad: bool
) -> None:
    rng = np.random.default_rng(len(rule.name))
    size = 1003
    var, grad = rng.normal(size=(2, size)).astype(dtype)
    slots = [rng.uniform(1, 2, size).astype(dtype) for _ in rule.slots]
    grad[:4] = [0, np.inf, -np.inf, np.nan]
    if zero_grad:
        grad[:] = 0
    scalars = {name: dtype(rng.uniform(0.1, 0.9)) for name in rule.scalars}
    if "power" in scalars:
        scalars["power"] = dtype(power)
    flags = [name for name in scalars if name.startswith("is_")]
    scalars |= dict.fromkeys(flags, dtype(power == 0.5))
    expected = [array.copy() for array in (var, *slots)]
    with np.errstate(all="ignore"):
        rule.apply(expected[0], grad, *expected[1:], **scalars)
        [replayed] = replayed_rules(rule, np.dtype(dtype), [scalars], zero_grad=zero_grad)
        scratch = [np.full(size, 7, dtype) for dtype in replayed.scratch_dtypes]
        replayed.apply([var, *slots], None if zero_grad else grad, scratch)
    for got, want in zip((var, *slots), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@update_rule
def roundabout(var: Any, grad: Any, memory: Any, *, bound: Any) -> None:
    """Uses more than gpuopt's rules do: other functions, comparisons, values read after a store."""
    kept = np.where(grad > bound, 0, grad) ** 2
    kept -= np.minimum(-abs(memory), bound)
    memory[...] = kept
    kept = kept * 3
    var += np.clip(kept, None, 5 * bound) + (1 - memory) / np.exp(-grad)
    memory[...] = 2.0


def test_a_users_rule_may_use_any_function_of_elements() -> None:
    rng = np.random.default_rng(0)
    var, grad, memory = rng.normal(size=(3, 100)).astype(np.float32)
    expected = var.copy(), memory.copy()
    roundabout.apply(expected[0], grad, expected[1], bound=np.float32(0.3))
    [replayed] = replayed_rules(roundabout, np.dtype(np.float32), [{"bound": np.float32(0.3)}])
    scratch = [np.empty(100, dtype) for dtype in replayed.scratch_dtypes]
    replayed.apply([var, memory], grad, scratch)
    np.testing.assert_array_equal((var, memory), expected)


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("an `if` on an array", lambda var, grad: var if (var > 0) else grad),
        ("writing to the gradient", lambda var, grad: np.add(var, grad, out=grad)),
        ("np.sum", lambda var, grad: var + np.sum(grad)),
        ("reduce", lambda var, grad: np.add.reduce(grad)),
        ("array.mean", lambda var, grad: grad.mean()),
        ("conversion", lambda var, grad: np.float64(grad)),
        (r"array\[0\]", lambda var, grad: var.__setitem__(0, 1)),
        (r"np\.add with where=", lambda var, grad: np.add(var, 1, where=grad)),
    ],
)
def test_a_rule_that_is_not_elementwise_is_refused_by_name(what: str, body: Any) -> None:
    def apply(var: Any, grad: Any) -> None:
        var -= grad
        body(var, grad)

    with pytest.raises(TypeError, match=f"^apply: .*{what}"):
        update_rule(apply)


# Dense updates.


def steps_of(name: str, dtype: Any, gradients: list[np.ndarray], threads: int) -> list[bytes]:
    """Two steps of an optimizer, dense and sparse, as bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUOPT_THREADS", str(threads))
        arguments: dict[str, Any] = {"MomentumOptimizer": {"momentum": 0.9}}.get(name, {})
        optimizer = getattr(gpuopt, name)(learning_rate=0.01, **arguments)
        variables = [Variable(np.ones(g.shape), dtype=dtype) for g in gradients]
        table = Variable(np.ones((3000, 200)), dtype=dtype)
        rows = np.random.default_rng(1).integers(0, 3000, 2000)
        slices = IndexedSlices(np.ones((2000, 200), dtype) * rows[:, None].astype(dtype), rows)
        for _ in range(2):
            pairs = [
                (g.astype(dtype), variable)
                for g, variable in zip(gradients, variables, strict=True)
            ]
            optimizer.apply_gradients([*pairs, (slices, table)])
        return [v.numpy().tobytes() for v in [*variables, table, *optimizer.variables()]]


@pytest.mark.parametrize("compiled", ["0", pytest.param("1", marks=pytest.mark.cxx)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "name", ["AdamOptimizer", "MomentumOptimizer", "LazyAdamOptimizer", "FtrlOptimizer"]
)
@pytest.mark.one_in(4)
def test_results_do_not_depend_on_the_number_of_threads(
    name: str,
    dtype: Any,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", compiled)
    rng = np.random.default_rng(0)
    sizes = [LARGE, 7, 60_000, 16, 100, 9000]
    gradients = [rng.normal(size=size).astype(np.float32) for size in sizes]
    first, *others = (steps_of(name, dtype, gradients, threads) for threads in (1, 2, 5))
    assert all(other == first for other in others)


@pytest.mark.cxx
@pytest.mark.parametrize("smallest", [1, 512, 10**9])
def test_compiled_code_reads_gradients_of_small_variables_joined(
    smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []
    update_chunks = CompiledRule.update_chunks

    def update(self: Any, table: Any, scalars: bytes, gradients: bytes, *taken: Any) -> None:
        joined.append(len(gradients) // 4)
        update_chunks(self, table, scalars, gradients, *taken)

    monkeypatch.setattr(CompiledRule, "update_chunks", update)
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=size).astype(np.float32) for size in (7, 5000, 511, 512, 8191, 8192)]
    gradients = [rng.normal(size=each.size).astype(np.float32) for each in starts]

    def stepped(limits: CpuLimits) -> list[Variable]:
        variables = [Variable(start) for start in starts]
        with using(Device.cpu, CpuBackend(limits)):
            optimizer = gpuopt.AdamOptimizer(0.1)
            for _ in range(2):
                optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        return variables

    alone = stepped(CpuLimits(1, 1, large_elements=0))
    assert not any(joined)
    joined.clear()
    found = stepped(CpuLimits(small_compiled_elements=smallest, large_elements=0))
    assert set(joined) == {{1: 0, 512: 518, 10**9: 14_221}[smallest]}
    for one, other in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.cxx
@pytest.mark.parametrize(
    ("name", "is_exact"),
    [("AdamOptimizer", True), ("AdaMaxOptimizer", True), ("FtrlOptimizer", False)],
)
def test_small_steps_are_compiled_in_time_with_the_same_bits(
    name: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    compiled: list[Any] = []
    noted = noting(compiled, CompiledRule.update_chunks)
    monkeypatch.setattr(CompiledRule, "update_chunks", noted)
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=size).astype(np.float32) for size in (10, 1, 700)]
    steps = [[rng.normal(size=each.size).astype(np.float32) for each in starts] for _ in range(6)]

    def stepped(limits: CpuLimits) -> list[Variable]:
        variables = [Variable(start) for start in starts]
        with using(Device.cpu, CpuBackend(limits)):
            optimizer = getattr(gpuopt, name)(0.1)
            for gradients in steps:
                optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        return variables

    by_numpy = stepped(CpuLimits())
    assert not compiled
    found = stepped(CpuLimits(compiled_steps=2))
    assert len(compiled) == 4 * is_exact
    for one, other in zip(by_numpy, found, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.cxx
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_small_steps_of_rows_are_compiled_in_time_with_the_same_bits(
    index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    compiled: list[Any] = []
    noted = noting(compiled, CompiledRows.update_table)
    monkeypatch.setattr(CompiledRows, "update_table", noted)
    rng = np.random.default_rng(0)
    start = rng.normal(size=(300, 9)).astype(np.float32)
    steps = [
        (rng.normal(size=(400, 9)).astype(np.float32), many_repeats(rng, 400).astype(index) % 300)
        for _ in range(6)
    ]

    def stepped(limits: CpuLimits) -> np.ndarray:
        table = Variable(start)
        with using(Device.cpu, CpuBackend(limits)):
            optimizer = gpuopt.LazyAdamOptimizer(0.1)
            for values, rows in steps:
                optimizer.apply_gradients([(IndexedSlices(values, rows[::-1]), table)])
            values = table.value()[:50]
            optimizer.apply_gradients([(IndexedSlices(values, np.arange(50)[::-1]), table)])
        return table.numpy()

    by_numpy = stepped(CpuLimits())
    assert not compiled
    found = stepped(CpuLimits(compiled_steps=2))
    assert len(compiled) == 5
    assert by_numpy.tobytes() == found.tobytes()


def noting(calls: list[Any], method: Any) -> Any:
    def noted(self: Any, *args: Any) -> Any:
        calls.append(self)
        return method(self, *args)

    return noted


@pytest.mark.parametrize("count", [1, 20, 40])
@pytest.mark.parametrize("size", [16, 10, 5000, 20_000, 300_000])
def test_a_gradient_that_lies_in_another_variable_is_read_before_it_is_written(
    size: int, count: int, every_cpu_form: str
) -> None:
    rng = np.random.default_rng(0)
    variables = [Variable(rng.normal(size=size)) for _ in range(min(count, 2 * 10**6 // size) + 1)]
    before = [variable.numpy() for variable in variables]
    gradients = [variable.value()[::-1] for variable in [*variables[1:], variables[0]]]
    gradients[0] = variables[-1].value()
    gpuopt.GradientDescentOptimizer(np.float64(0.5)).apply_gradients(
        zip(gradients, variables, strict=True)
    )
    wanted = [g[::-1] for g in [*before[1:], before[0]]]
    wanted[0] = before[-1]
    for variable, start, gradient in zip(variables, before, wanted, strict=True):
        np.testing.assert_array_equal(variable.numpy(), start - 0.5 * gradient)


@pytest.mark.parametrize("repeated", [False, True], ids=["unique", "repeated"])
def test_values_that_lie_in_their_table_are_read_before_it_is_written(
    repeated: bool, every_cpu_form: str
) -> None:
    start = np.random.default_rng(0).integers(-99, 99, (6000, 200)).astype(np.float32)
    table, rows = Variable(start), np.arange(6000)
    if repeated:
        rows[1] = 0
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
        [(IndexedSlices(table.value()[::-1], rows), table)]
    )
    want = start.copy()
    np.subtract.at(want, rows, start[::-1])
    np.testing.assert_array_equal(table.numpy(), want)


def test_a_misaligned_gradient_is_read(every_cpu_form: str) -> None:
    memory = np.zeros(4 * 300_000 + 2, np.uint8)
    gradient = memory[2:].view(np.float32)
    gradient[:] = np.arange(300_000)
    variable, table = Variable(gradient * 0), Variable(np.zeros((3000, 100), np.float32))
    slices = IndexedSlices(gradient.reshape(3000, 100), np.arange(3000))
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(gradient, variable), (slices, table)])
    np.testing.assert_array_equal(variable.numpy(), -gradient)
    np.testing.assert_array_equal(table.numpy().ravel(), -gradient)


def test_a_broadcast_or_transposed_gradient_is_read_by_its_strides(every_cpu_form: str) -> None:
    rows = np.arange(600, dtype=np.float32)
    square = np.arange(600 * 600, dtype=np.float32).reshape(600, 600)
    small, large = Variable(np.zeros((4, 3), np.float32)), Variable(square * 0)
    turned, plain = Variable(square * 0), Variable(square * 0)
    pairs = [(np.broadcast_to(np.float32([1, 2, 3]), (4, 3)), small)]
    pairs += [(np.broadcast_to(rows, (600, 600)), large), (square, plain), (square.T, turned)]
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs)
    np.testing.assert_array_equal(small.numpy(), [[-1, -2, -3]] * 4)
    np.testing.assert_array_equal(large.numpy(), [-rows] * 600)
    np.testing.assert_array_equal(turned.numpy(), -square.T)
    np.testing.assert_array_equal(plain.numpy(), -square)


@pytest.mark.internal
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_large_step_takes_less_than_eight_megabytes(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", "0")
    # No other test has this many: neither these threads nor a new one have scratch arrays yet.
    monkeypatch.setenv("GPUOPT_THREADS", "6")
    shapes = [(4 * 2**20,), (2**20,), *[(64,)] * 200, (1000, 1000)]
    pairs = [(np.ones(s, dtype), Variable(np.ones(s, dtype))) for s in shapes]
    optimizer = gpuopt.AdamOptimizer()
    optimizer._create_slots([variable for _, variable in pairs])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        step = threading.Thread(target=optimizer.apply_gradients, args=(pairs,))
        step.start()
        step.join()
        assert 1e6 < tracemalloc.get_traced_memory()[1] - before < 8e6
    finally:
        tracemalloc.stop()


@pytest.mark.internal
def test_variables_made_in_a_row_lie_side_by_side_and_large_ones_apart_in_a_page() -> None:
    small = [Variable(np.zeros(64, np.float32)).value().ctypes.data for _ in range(100)]
    assert np.count_nonzero(np.diff(small) == 256) >= 98
    large = [Variable(np.zeros(100_000, np.float32)).value() for _ in range(8)]
    places = [array.ctypes.data % 4096 for array in large]
    assert len(set(places)) == 8
    assert all(place % 64 == 0 for place in places)


# Plans.


@pytest.mark.internal
@pytest.mark.parametrize("size", [100_000, LARGE])
def test_a_variables_state_is_freed_while_others_of_its_plan_live_on(size: int) -> None:
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    variables = [Variable(np.zeros(size)) for _ in range(2)]
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(size), v) for v in variables])
    slot = optimizer.get_slot(variables[0], "momentum")
    assert slot is not None
    memory = weakref.ref(slot.value().base)
    del variables[0], slot
    assert memory() is None


def test_a_slot_that_a_subclass_replaces_is_the_one_that_is_updated() -> None:
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    variable = Variable(np.zeros(3))
    optimizer.apply_gradients([(np.ones(3), variable)])
    other = Variable(np.full(3, 10.0), trainable=False)
    optimizer._slot_dict("momentum")[variable.identity] = other
    optimizer.apply_gradients([(np.ones(3), variable)])
    np.testing.assert_array_equal(other.numpy(), 10 * 0.5 + np.ones(3))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_slot_of_another_type_is_converted(sparse: bool, every_cpu_form: str) -> None:
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)
    variable = Variable(np.zeros((3, 1), np.float32))
    slot = Variable(np.full((3, 1), 10.0, np.float64), trainable=False)
    optimizer._slot_dict("momentum")[variable.identity] = slot
    ones = np.ones((3, 1), np.float32)
    gradient = IndexedSlices(ones, [0, 1, 2]) if sparse else ones
    optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(slot.numpy(), np.full((3, 1), 6.0))
    np.testing.assert_array_equal(variable.numpy(), np.full((3, 1), -6.0))


# Repeated rows.


def many_repeats(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Some rows once, some often, and one in several stretches."""
    indices = np.minimum(rng.zipf(1.3, num_rows), 10**9)
    indices[num_rows // 2 :] = 7
    return rng.permutation(indices)


@pytest.mark.parametrize("first", [0, 77])
@pytest.mark.parametrize("width", [(), (1,), (2,), (3,), (64,), (5, 1), (1, 1), (70,)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 50, 3000])
@pytest.mark.parametrize("zeros", [0, 7 % 3], ids=["of_some", "of_the_most_frequent"])
@pytest.mark.one_in(4)
def test_repeated_rows_are_added_in_the_documented_order(
    width: tuple[int, ...], num_rows: int, first: int, zeros: int
) -> None:
    rng = np.random.default_rng(num_rows)
    indices = many_repeats(rng, num_rows)
    values = (10.0 ** rng.integers(-6, 6, (num_rows, *width))).astype(np.float32)
    values[indices % 3 == zeros] = -0.0
    want = sums_of_rows(values, indices, first)

    groups = group_rows(indices, first)
    sums, order = sum_rows(values, groups)
    assert sorted(groups.rows[order].tolist()) == sorted(want)
    for row, total in zip(groups.rows[order].tolist(), sums, strict=True):
        assert total.tobytes() == want[row].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [(), (3,), (5, 14)], ids=str)
def test_sums_of_rows_are_in_order_of_appearance(
    width: tuple[int, ...], dtype: Any, every_cpu_form: str
) -> None:
    rng = np.random.default_rng(0)
    indices = many_repeats(rng, 3000).astype(np.int32)
    values = (10.0 ** rng.integers(-6, 6, (3000, *width))).astype(dtype)
    values[indices % 3 == 0] = -0.0
    want = sums_of_rows(values, indices)
    sums, rows = backend_for(Device.cpu).sum_duplicate_rows(values, indices)
    assert rows.tolist() == list(want)
    assert rows.dtype == indices.dtype
    assert sums.tobytes() == np.array(list(want.values()), dtype).tobytes()


@pytest.mark.parametrize("num_rows", [10**4, 10**6])
def test_the_sum_of_a_row_that_is_named_often_is_near_the_exact_one(
    num_rows: int, every_cpu_form: str
) -> None:
    rng = np.random.default_rng(num_rows)
    indices = np.zeros(num_rows, np.int64)
    for values in (np.full(num_rows, 0.1), rng.random(num_rows), rng.normal(size=num_rows)):
        values = values.astype(np.float32)
        table = Variable(np.zeros(2, np.float32))
        slices = IndexedSlices(values, indices)
        gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(slices, table)])
        exact = math.fsum(values.tolist())
        bound = (32 + 16 + num_rows / 512) * np.finfo(np.float32).eps * np.abs(values).sum()
        assert abs(-float(table.numpy()[0]) - exact) <= bound


def test_indices_of_many_digits_are_grouped_alike() -> None:
    high = 2**62 + 2**40 + 2**20
    indices = np.array([high, 5, high, 7 + 2**16, 5, 5])
    groups = group_rows(indices)
    assert groups.rows.tolist() == [5, 7 + 2**16, high]
    assert groups.positions.tolist() == [1, 4, 5, 3, 0, 2]
    assert groups.begins.tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_are_grouped_as_a_sort_would(dtype: Any) -> None:
    indices = np.random.default_rng(0).integers(0, 200_000, 5000).astype(dtype)
    indices[::3] %= 50
    groups = group_rows(indices)
    rows, begins = np.unique(np.sort(indices), return_index=True)
    np.testing.assert_array_equal(groups.positions, np.argsort(indices, kind="stable"))
    np.testing.assert_array_equal(groups.rows, rows)
    np.testing.assert_array_equal(groups.begins, [*begins, len(indices)])
    np.testing.assert_array_equal(groups.firsts, begins)
    assert {array.dtype for array in groups} == {np.dtype(np.int64)}


@pytest.mark.cxx
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_rows", [1, 2, 5000])
def test_compiled_code_groups_rows_in_order_of_appearance(num_rows: int, dtype: Any) -> None:
    indices = np.random.default_rng(0).integers(0, 2**31 - 1, (num_rows, 2)).astype(dtype)[:, 0]
    indices[::3] %= 50
    want: dict[int, list[int]] = {}
    for position, row in enumerate(indices.tolist()):
        want.setdefault(row, []).append(position)

    rows, positions, begins, firsts = compiled_groups(indices, 11)
    assert rows.tolist() == list(want)
    parts = [positions[begin:end].tolist() for begin, end in pairwise(begins)]
    assert parts == list(want.values())
    of_three = np.diff(begins) > 2  # sums of one or two do not depend on it
    exact = 11 + np.searchsorted(np.sort(indices), rows)
    assert np.array_equal(firsts[of_three], exact[of_three])
    assert of_three.sum() == (50 if num_rows == 5000 else 0)


@pytest.mark.parametrize("width", [1, 3, 64, 700])
def test_a_sparse_step_adds_repeated_rows_in_the_documented_order(
    width: int, every_cpu_form: str
) -> None:
    """Of three tables, those of one width are sorted together."""
    rng = np.random.default_rng(width)
    given: list[tuple[IndexedSlices, Variable]] = []
    want: list[np.ndarray] = []
    before = 0
    for columns in (width, 5, width):
        indices = np.minimum(many_repeats(rng, 1300), 999).astype(np.int32)
        values = (10.0 ** rng.integers(-6, 6, (1300, columns))).astype(np.float32)
        given.append((IndexedSlices(values, indices), Variable(np.zeros((1000, columns), "f"))))
        want.append(np.zeros((1000, columns), np.float32))
        for row, total in sums_of_rows(values, indices, before * (columns == width)).items():
            want[-1][row] = -total
        before += len(indices) * (columns == width)
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(given)
    for (_, table), expected in zip(given, want, strict=True):
        np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize("name", ["AdagradOptimizer", "AdamOptimizer"])
def test_values_that_lie_in_the_table_are_read_before_it_is_written(
    name: str, every_cpu_form: str
) -> None:
    rows = np.roll(np.arange(1000), 1)
    tables = [Variable(np.arange(4000.0).reshape(1000, 4)) for _ in range(2)]
    for table, values in zip(tables, [tables[0].value(), tables[1].numpy()], strict=True):
        optimizer = getattr(gpuopt, name)(0.5)
        optimizer.apply_gradients([(IndexedSlices(values, rows), table)])
    np.testing.assert_array_equal(tables[0].numpy(), tables[1].numpy())


# Threads.


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1.5"])
def test_an_invalid_number_of_threads_is_refused(
    threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = np.ones(300_000)  # smaller updates have one thread in any case
    variable = Variable(ones)
    monkeypatch.setenv("GPUOPT_THREADS", threads)
    with pytest.raises(ValueError, match=f"GPUOPT_THREADS='{threads}' is not a whole number"):
        gpuopt.GradientDescentOptimizer(0.1).apply_gradients([(ones, variable)])
    assert np.array_equal(variable.numpy(), ones)


@pytest.mark.internal
def test_an_error_in_any_thread_is_raised_and_leaves_no_work_behind() -> None:
    done = []

    def work(task: int) -> None:
        if task == 5:
            raise ArithmeticError("task 5")
        time.sleep(0.001)
        done.append(task)

    with pytest.raises(ArithmeticError, match="task 5"):
        share_out(work, range(1000), 3)
    assert len(done) < 500
    before = len(done)
    share_out(done.append, [1001], 3)
    assert done[before:] == [1001]


@pytest.mark.internal
def test_a_thread_that_comes_too_late_to_help_keeps_no_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []  # made by no thread
    monkeypatch.setattr(
        "gpuopt.backends.cpu.threads._helpers.call", lambda help, times: calls.append(help)
    )
    array = np.zeros(3)
    watched = weakref.ref(array)

    def work(task: int, array: Any = array) -> None:
        array[task] += 1

    share_out(work, range(3), 2)
    assert np.array_equal(array, [1, 1, 1])
    del array, work
    assert watched() is None
    [late] = calls
    late()


@pytest.mark.internal
def test_many_threads_that_lock_lose_no_update_and_wait_for_each_other_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUOPT_COMPILED", "0")
    monkeypatch.setenv("GPUOPT_THREADS", "4")
    variables = [Variable(np.zeros(LARGE)), Variable(np.zeros(5))]
    optimizer = gpuopt.GradientDescentOptimizer(1.0, use_locking=True)
    gradients = [np.ones(LARGE), np.ones(5)]

    def train() -> None:
        for _ in range(3):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    threads = [threading.Thread(target=train, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, -24.0))


@pytest.mark.internal
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be counted")
def test_a_forked_child_makes_threads_of_its_own() -> None:
    program = f"""
import os, warnings
import numpy as np
import gpuopt
variable = gpuopt.Variable(np.zeros({LARGE}))
step = lambda: gpuopt.GradientDescentOptimizer(1.0).apply_gradients(
    [(np.ones({LARGE}), variable)])
step()
warnings.simplefilter("ignore")  # of Python, that a child has none of its parent's threads
child = os.fork()
step()
assert (variable.numpy() == -2).all()
if child == 0:
    os._exit(len(os.listdir("/proc/self/task")) == 1)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = {**os.environ, "GPUOPT_THREADS": "3", "GPUOPT_COMPILED": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environment)


# Compiled rules.


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder, for what is compiled and for a compiler that counts its calls."""
    monkeypatch.setenv("GPUOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUOPT_COMPILED", "1")
    return tmp_path


def compiler_script(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{text}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))


def new_descent() -> type[gpuopt.GradientDescentOptimizer]:
    """An optimizer whose rule this process has not compiled yet."""
    rule = gpuopt.GradientDescentOptimizer.rule
    apply = FunctionType(rule.apply.__code__, rule.apply.__globals__)
    apply.__module__ = rule.apply.__module__

    class Descent(gpuopt.GradientDescentOptimizer):
        rule = replace(gpuopt.GradientDescentOptimizer.rule, apply=apply)

    return Descent


def large_step(optimizer: type[gpuopt.GradientDescentOptimizer]) -> None:
    variable = Variable(np.zeros(LARGE, np.float32))
    gradient = np.ones(LARGE, np.float32)
    optimizer(1.0).apply_gradients([(gradient, variable)])
    assert (variable.numpy() == -1).all()


@pytest.mark.internal
@pytest.mark.cxx
def test_a_rule_is_compiled_once_for_large_work_and_found_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_script(fresh, 'exec g++ "$@"', monkeypatch)
    optimizer = new_descent()
    variable = Variable(np.zeros(100, np.float32))
    optimizer(1.0).apply_gradients([(np.ones(100, np.float32), variable)])
    assert not (fresh / "calls").exists()
    large_step(optimizer)
    large_step(optimizer)
    large_step(new_descent())  # as another process
    assert (fresh / "calls").read_text() == "called\n"
    assert [path.suffix for path in (fresh / "cache").iterdir()] == [".so"]
    monkeypatch.setenv("GPUOPT_COMPILED", "0")
    (fresh / "compiler").unlink()
    large_step(optimizer)


@pytest.mark.internal
def test_a_compiler_that_fails_leaves_the_work_to_numpy_with_a_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler_script(fresh, "echo no such flag >&2; exit 1", monkeypatch)
    with caplog.at_level(logging.WARNING, "gpuopt"):
        large_step(new_descent())
    assert "no such flag" in caplog.text
    assert "so numpy is used" in caplog.text


@pytest.mark.internal
def test_without_a_compiler_numpy_works_without_a_warning(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fresh / "none"))
    large_step(new_descent())
    assert caplog.text == ""
    assert host_compiler.why_not_compiled() == "no C++ compiler was found; CXX may name one"


@pytest.mark.internal
@pytest.mark.cxx
def test_a_compiler_is_looked_for_where_path_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    found = host_compiler.compiler()
    assert found
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_compiler.compiler() is None
    (tmp_path / "g++").symlink_to(found[0])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}")
    assert host_compiler.compiler() == (str(tmp_path / "g++"),)


def test_a_users_rule_with_the_name_of_a_gpuopt_rule_is_not_confused_with_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_script(fresh, "exit 1", monkeypatch)

    @update_rule
    def gradient_descent(var: Any, grad: Any, *, learning_rate: Any) -> None:
        var += learning_rate * grad

    class Ascent(gpuopt.GradientDescentOptimizer):
        rule = gradient_descent

    variable = Variable(np.zeros(LARGE, np.float32))
    Ascent(1.0).apply_gradients([(np.ones(LARGE, np.float32), variable)])
    assert (variable.numpy() == 1).all()


@pytest.mark.internal
def test_every_exported_optimizer_is_tested_in_this_file() -> None:
    assert {cls.rule for cls in optimizer_classes().values()} <= set(RULES)
