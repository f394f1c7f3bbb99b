"""Stochastic rounding as an option of optimizers: on every device, with what else a step does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_slots import array_slots
from each_device import variable_on
from every_optimizer import make, one_of_each_shape
from restored_runs import Run, check_a_restored_run

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.rules.rounded import BFLOAT16, key_of_step, round_at_random

pytestmark = pytest.mark.value

SEED = 11
Make = Callable[..., Any]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda **more: gpuopt.GradientDescentOptimizer(0.01, **more),
    "adam": lambda **more: gpuopt.AdamOptimizer(0.01, **more),
    "lazy-adam": lambda **more: gpuopt.LazyAdamOptimizer(0.01, **more),
    "adam-w": lambda **more: gpuopt.AdamWOptimizer(0.01, 0.01, **more),
    "cautious": lambda **more: gpuopt.TorchAdamWOptimizer(0.01, cautious=True, **more),
    "lamb": lambda **more: gpuopt.LAMBOptimizer(0.01, **more),
}
# What else a step may do, by the arguments for it.
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.5},
    "clip_value": {"clip_value": 0.01},
    "groups": {"groups": [ParameterGroup("w[24]", learning_rate=0.5)]},
    "clipped groups": {"clip_norm": 2.0, "groups": [ParameterGroup("w[24]", clip_value=0.02)]},
}
SHAPES = [(), (1,), (40,), (5, 3), (0,), (300, 7)]
ROWS = np.array([3, 3, 0, 11, 3])
# Rules that sum over a variable see the gradient of a table in the table's type: rows add up to no
# more digits than that has if none is named twice.
OTHER_ROWS = np.array([3, 5, 0, 11, 7])
CASES = [
    *((name, stage, "mixed") for name in OPTIMIZERS for stage in ("plain", "clipped groups")),
    *(("adam", stage, kind) for stage in STAGES for kind in ("dense", "sparse")),
]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = BFLOAT16) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def gradients(xp: Any, kind: str, dtype: Any, rows: Any) -> list[Any]:
    dense = [
        xp.asarray(normal(50 + i, shape, BFLOAT16).astype(dtype)) for i, shape in enumerate(SHAPES)
    ]
    if kind != "dense":
        values = normal(60, (5, 7)).astype(dtype)
        dense[-1] = IndexedSlices(xp.asarray(values), xp.asarray(rows), SHAPES[-1])
    if kind == "sparse":
        dense = [
            IndexedSlices(xp.asarray(normal(61, (5,)).astype(dtype)), xp.asarray(rows), (40,)),
            dense[-1],
        ]
    return dense


def written(optimizer: Any, variable: Variable) -> list[np.ndarray[Any, Any]]:
    slots = [optimizer.get_slot(variable, name) for name in array_slots(optimizer)]
    return [each.numpy() for each in (variable, *slots)]


@pytest.mark.parametrize(("name", "stage", "kind"), CASES)
@pytest.mark.one_in(2)
def test_a_step_is_that_of_float32_variables_rounded_by_the_steps_bits(
    name: str, stage: str, kind: str, xp: Any
) -> None:
    which = range(len(SHAPES)) if kind != "sparse" else (2, 5)
    mine = [variable_on(xp, normal(i, SHAPES[i]), name=f"w{i}") for i in which]
    theirs = [Variable(normal(i, SHAPES[i]).astype(np.float32), name=f"w{i}") for i in which]
    options = STAGES[stage]
    optimizer = OPTIMIZERS[name](stochastic_rounding=SEED, **options)
    exact = OPTIMIZERS[name](**options)
    rows = OTHER_ROWS if optimizer.rule.sums else ROWS
    given, wide = (gradients(m, kind, t, rows) for m, t in ((xp, BFLOAT16), (np, np.float32)))
    optimizer.apply_gradients(list(zip(given, mine, strict=True)))
    exact.apply_gradients(list(zip(wide, theirs, strict=True)))
    key = key_of_step(SEED, 0)
    for w, v in zip(mine, theirs, strict=True):
        arrays = [each.reshape(-1) for each in written(exact, v)]
        rounded = round_at_random(arrays, np.arange(v.numpy().size, dtype=np.uint64), key)
        for got, expected in zip(written(optimizer, w), rounded, strict=True):
            a, b = got.reshape(-1).astype(np.float64), expected.astype(np.float64)
            np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-6)
            # Digits that differ in float32 round to other neighbours at times.
            assert (a != b).sum() <= (0.005 * a.size if xp is not np else 0) + (xp is not np)


@one_of_each_shape
def test_every_elementwise_optimizer_takes_it(name: str, arguments: dict[str, Any]) -> None:
    if make(name, arguments).rule.row_slots:
        with pytest.raises(ValueError, match="a number for each row"):
            make(name, arguments, stochastic_rounding=SEED)
        return
    start = np.random.default_rng(0).uniform(1, 2, (60, 40)).astype(BFLOAT16)
    w, v = Variable(start), Variable(start.astype(np.float32))
    mine, exact = make(name, arguments, stochastic_rounding=SEED), make(name, arguments)
    for seed in range(3):
        gradient = normal(seed, start.shape)
        mine.apply_gradients([(gradient, w)])
        exact.apply_gradients([(gradient.astype(np.float32), v)])
    moved = np.abs(v.numpy() - start.astype(np.float32)).max()
    error = w.numpy().astype(np.float64) - v.numpy()
    assert abs(error.mean()) <= 0.02 * moved + 2.0**-11
    assert mine.get_slot_names() == exact.get_slot_names()


def test_small_steps_are_kept_on_average(xp: Any) -> None:
    ones = np.ones(4000, BFLOAT16)
    w, nearest = (variable_on(xp, ones, name=name) for name in ("w", "nearest"))
    for variable, options in ((w, {"stochastic_rounding": SEED}), (nearest, {})):
        optimizer = gpuopt.AdamOptimizer(1e-4, **options)
        for _ in range(100):
            optimizer.apply_gradients([(xp.asarray(ones), variable)])
    assert (nearest.numpy() == 1).all()
    assert abs(w.numpy().astype(np.float64).mean() - 0.99) < 2e-4


def test_variables_of_more_bits_are_as_without() -> None:
    results = []
    for options in ({}, {"stochastic_rounding": SEED}):
        pairs = [(normal(1, (30,), dtype), Variable(normal(0, (30,), dtype))) for dtype in "fd"]
        optimizer = gpuopt.AdamOptimizer(0.01, **options)
        optimizer.apply_gradients(pairs)
        results.append([variable.numpy() for _, variable in pairs])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def step(optimizer: Any, variable: Variable, seed: int) -> None:
    optimizer.apply_gradients([(normal(seed, variable.shape), variable)])


@pytest.mark.parametrize("by_saver", [False, True], ids=["state_dict", "Saver"])
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after its first step"])
def test_a_restored_run_goes_on_to_the_bit(by_saver: bool, is_made: bool, tmp_path: Path) -> None:
    def adam() -> Any:
        return gpuopt.AdamOptimizer(0.01, stochastic_rounding=SEED)

    run, other = (
        Run(Variable(start, name="w"), adam())
        for start in (normal(0, (300,)), np.zeros(300, BFLOAT16))
    )
    check_a_restored_run(run, other, step, tmp_path, by_saver=by_saver, is_made=is_made)


@pytest.mark.parametrize("seeds", [(None, SEED), (SEED, None)], ids=["begins", "ends"])
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after its first step"])
def test_a_run_may_begin_or_end_to_round_so(seeds: Any, is_made: bool) -> None:
    w, v = (Variable(normal(0, (30,)), name="w") for _ in range(2))
    first, then = (gpuopt.AdamOptimizer(0.01, stochastic_rounding=seed) for seed in seeds)
    step(first, w, 0)
    if is_made:
        step(then, v, 5)
    then.load_state_dict(first.state_dict({"w": w}), {"w": v})
    v.assign(w.numpy())
    step(then, v, 1)
    np.testing.assert_allclose(
        then.get_slot(v, "m").numpy().astype(np.float32),
        0.9 * first.get_slot(w, "m").numpy().astype(np.float32) + 0.1 * normal(1, (30,), "f"),
        rtol=2.0**-6,
        atol=1e-3,
    )


def test_a_step_that_is_left_out_does_not_count() -> None:
    results = []
    for is_bad in (False, True):
        w = Variable(normal(0, (300,)))
        optimizer = gpuopt.AdamOptimizer(0.01, on_nonfinite="skip", stochastic_rounding=SEED)
        step(optimizer, w, 0)
        if is_bad:
            optimizer.apply_gradients([(np.full(300, np.nan, BFLOAT16), w)])
        step(optimizer, w, 1)
        results.append(w.numpy())
    np.testing.assert_array_equal(*results)


def test_a_scaled_step_that_is_left_out_does_not_count(xp: Any) -> None:
    results = []
    for is_bad in (False, True):
        w = variable_on(xp, normal(0, (300,)))
        optimizer = gpuopt.AdamOptimizer(0.01, stochastic_rounding=SEED)
        scaled = gpuopt.LossScaleOptimizer(optimizer, gpuopt.FixedLossScaleManager(8.0))
        for gradient in (
            normal(1, (300,)),
            *[np.full(300, np.inf, BFLOAT16)] * is_bad,
            normal(2, (300,)),
        ):
            scaled.apply_gradients([(xp.asarray(gradient), w)])
        results.append(w.numpy())
    np.testing.assert_array_equal(*results)


def test_a_refused_row_does_not_count(xp: Any) -> None:
    table = variable_on(xp, normal(0, (6, 4)))
    optimizer = gpuopt.GradientDescentOptimizer(2.0**-10, stochastic_rounding=SEED)
    slices = [
        IndexedSlices(xp.asarray(normal(1, (2, 4))), xp.asarray(np.array(rows)))
        for rows in ([1, 2], [1, 6])
    ]

    def step_and_read(which: IndexedSlices) -> None:
        optimizer.apply_gradients([(which, table)])
        table.numpy()

    step_and_read(slices[0])
    before = table.numpy()
    with pytest.raises(IndexError):
        step_and_read(slices[1])
    np.testing.assert_array_equal(table.numpy(), before)
    assert optimizer.state.host_scalar("rounded_steps").numpy() == 1


@pytest.mark.contract
def test_what_cannot_be_rounded_so_is_refused_by_name() -> None:
    def adam(seed: Any = SEED, **more: Any) -> Any:
        return gpuopt.AdamOptimizer(stochastic_rounding=seed, **more)

    for seed in (1.0, True, "1"):
        with pytest.raises(TypeError, match="stochastic_rounding must be a seed, a whole number"):
            adam(seed)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="stochastic_rounding must be a seed from 0 to"):
            adam(seed)
    why = "stochastic_rounding=11 cannot be had with masters='float32'"
    for options in ({}, {"slot_bits": 8}):
        with pytest.raises(ValueError, match=why):
            adam(masters="float32", **options)
    half = Variable(np.ones(3, np.float16), name="half")
    with pytest.raises(ValueError, match='"half" is float16, and only bfloat16'):
        adam().apply_gradients([(np.ones(3, np.float16), half)])
    assert (half.numpy() == 1).all()

    class Own(gpuopt.GradientDescentOptimizer):
        def _apply_dense(self, grad: Any, var: Variable) -> None:
            super()._apply_dense(grad, var)

    with pytest.raises(NotImplementedError, match="which is rounded to nearest"):
        step(Own(0.1, stochastic_rounding=SEED), Variable(np.ones(3, BFLOAT16)), 0)


@pytest.mark.contract
def test_torch_does_not_round_so() -> None:
    pytest.importorskip("torch")
    w, optimizer = (
        Variable(np.ones(3, BFLOAT16)),
        gpuopt.TorchSGDOptimizer(0.1, stochastic_rounding=1),
    )
    step(optimizer, w, 0)
    with pytest.raises(ValueError, match="has stochastic_rounding, and torch's optimizers round"):
        gpuopt.optimizer_to_torch(optimizer, [w])
