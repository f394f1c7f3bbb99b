"""A stage of the gradient may have a slot: one that gpuopt does not have, in one file.

It puts a mean of all gradients in the gradient's place, beside a model of it in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pytest
from each_device import variable_on
from restored_runs import Run, check_a_restored_run
from smoothed_gradient import SmoothedGradient, register
from stages import STAGES

import gpuopt
from gpuopt import backends
from gpuopt.__main__ import main
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device

pytestmark = pytest.mark.value

DECAY = 0.75
SMOOTHED: dict[str, Any] = {SmoothedGradient.name: DECAY}
TABLE, ROWS = (12, 20), np.array([4, 1, 9, 0, 7, 1])
SHAPES = {"w0": (), "w1": (3,), "w2": (40,), "w3": (6, 5), "w4": (300, 7)}


@pytest.fixture(autouse=True)
def _is_known(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    register(monkeypatch)
    yield
    assert "cannot build" not in caplog.text


# What one optimizer does with smoothed gradients is what it does without by means.
KINDS_OF_STEPS: dict[str, Callable[..., Any]] = {
    **{name: make for name, make in STAGES.items() if "clip" not in name and name != "groups"},
    "float64 sums": lambda **more: gpuopt.LAMBOptimizer(0.01, **more),
    "clipped so widely that norms do not count": lambda **more: gpuopt.AdamOptimizer(
        clip_norm=2.0**20, **more
    ),
    "slots in bfloat16": lambda **more: gpuopt.AdamOptimizer(slot_dtype="bfloat16", **more),
    "rounded at random": lambda **more: gpuopt.AdamOptimizer(
        slot_dtype="bfloat16", stochastic_rounding=5, **more
    ),
    "several rates": lambda **more: gpuopt.AdamOptimizer(
        groups=[gpuopt.ParameterGroup("(w[24]|table2)(_.*)?", learning_rate=0.5)], **more
    ),
    "averaged": lambda **more: gpuopt.MomentumOptimizer(
        0.1, 0.9, averages=gpuopt.ExponentialMovingAverage(0.5), **more
    ),
}
SEVERAL_BITS = ("slot_bits", "slots in bfloat16", "rounded at random")


def drawn(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def summed(values: np.ndarray) -> np.ndarray:
    """Returns the sum of the rows of each of `ROWS`, for all rows."""
    dense = np.zeros(TABLE)
    np.add.at(dense, ROWS, values.astype(np.float64))
    return dense


class Means:
    """The stage in numpy and float64, which knows nothing of gpuopt's."""

    def __init__(self) -> None:
        self.of: dict[str, np.ndarray] = {}

    def smoothed(self, name: str, gradient: np.ndarray, step: int, rows: Any = ...) -> np.ndarray:
        mean = self.of.setdefault(name, np.zeros(gradient.shape))
        mean[rows] = DECAY * mean[rows] + (1 - DECAY) * gradient[rows]
        return mean / (1 - DECAY ** (step + 1))


def variables_of(xp: Any, kind: str, dtype: Any, suffix: str) -> list[gpuopt.Variable]:
    shapes = {} if kind == "sparse" else dict(SHAPES)
    if kind != "dense":
        shapes |= {"table": TABLE, "table2": TABLE}
    return [
        variable_on(xp, drawn(i, shape, dtype), name=name + suffix)
        for i, (name, shape) in enumerate(shapes.items())
    ]


def check(name: str, variable: gpuopt.Variable, got: Any, expected: Any) -> None:
    a, b = (np.asarray(each.numpy()).astype(np.float64) for each in (got, expected))
    bound = 0.02 if name in SEVERAL_BITS else 2e-5
    largest = np.abs(b).max(initial=0)
    np.testing.assert_allclose(a, b, rtol=0, atol=bound * largest, err_msg=variable.name)


@pytest.mark.parametrize("kind", ["dense", "sparse", "mixed"])
@pytest.mark.parametrize("name", KINDS_OF_STEPS)
@pytest.mark.parametrize("limits", ["small", "large"])
def test_every_kind_of_step_is_that_of_the_means(
    name: str, kind: str, limits: str, xp: Any
) -> None:
    make, means = KINDS_OF_STEPS[name], Means()
    dtype = np.float64 if "float64" in name else np.float32
    if limits == "large" and xp is not np:
        pytest.skip("of the host")
    large = {"small": 10**9, "large": 0}[limits]
    backend = CpuBackend(CpuLimits(small_elements=1, large_elements=large, elements_per_thread=64))
    with backends.using(Device.cpu, backend):
        mine, theirs = (variables_of(xp, kind, dtype, each) for each in ("", "_of_model"))
        ours, plain = make(**SMOOTHED), make()
        for step in range(3):
            pairs, expected = [], []
            for number, (w, v) in enumerate(zip(mine, theirs, strict=True)):
                v.assign(w.numpy())
                if w.name.startswith("table"):
                    values = drawn(100 * step + number, (len(ROWS), TABLE[1]), dtype)
                    mean = means.smoothed(w.name, summed(values), step, np.unique(ROWS))
                    named = np.unique(ROWS)
                    given = gpuopt.IndexedSlices(xp.asarray(values), xp.asarray(ROWS))
                    rows = xp.asarray(mean[named].astype(dtype))
                    model: Any = gpuopt.IndexedSlices(rows, xp.asarray(named))
                else:
                    gradient = drawn(100 * step + number, w.shape, dtype)
                    given = xp.asarray(gradient)
                    mean = means.smoothed(w.name, gradient.astype(np.float64), step)
                    model = xp.asarray(mean.astype(dtype))
                pairs.append((given, w))
                expected.append((model, v))
            ours.apply_gradients(pairs)
            plain.apply_gradients(expected)
            for w, v in zip(mine, theirs, strict=True):
                check(name, w, w, v)
                for slot in plain.get_slot_names():
                    check(name, w, ours.get_slot(w, slot), plain.get_slot(v, slot))
                own = ours.get_slot(w, "mean")
                assert own.shape == w.shape
                assert own.device == w.device
                check(name, w, own, gpuopt.Variable(means.of[w.name]))


@pytest.mark.parametrize("by_saver", [False, True], ids=["state_dict", "Saver"])
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after its first step"])
@pytest.mark.parametrize("more", [{}, {"slot_bits": 8}, {"catch_up": True}], ids=str)
def test_a_restored_run_goes_on_to_the_bit(
    by_saver: bool, is_made: bool, more: Any, xp: Any, tmp_path: Path
) -> None:
    def adam() -> Any:
        return gpuopt.AdamOptimizer(0.01, **SMOOTHED, **more)

    def step(optimizer: Any, variable: gpuopt.Variable, seed: int) -> None:
        values = xp.asarray(drawn(seed, (len(ROWS), 20)))
        optimizer.apply_gradients([(gpuopt.IndexedSlices(values, xp.asarray(ROWS)), variable)])

    run, other = (
        Run(variable_on(xp, start, name="w"), adam())
        for start in (drawn(0, TABLE), np.zeros(TABLE, np.float32))
    )
    check_a_restored_run(run, other, step, tmp_path, by_saver=by_saver, is_made=is_made)
    means = [each.optimizer.get_slot(each.variable, "mean").numpy() for each in (other, run)]
    np.testing.assert_array_equal(*means)


@pytest.mark.parametrize("options", [(SMOOTHED, {}), ({}, SMOOTHED)], ids=["ends", "begins"])
def test_a_run_that_begins_or_ends_to_have_it_is_refused(options: Any) -> None:
    first, then = (gpuopt.AdamOptimizer(0.01, **each) for each in options)
    w, v = (gpuopt.Variable(drawn(0, (30,)), name="w") for _ in range(2))
    first.apply_gradients([(drawn(1, (30,)), w)])
    with pytest.raises(ValueError, match=r'has (a|no) slot "mean"'):
        then.load_state_dict(first.state_dict({"w": w}), {"w": v})


@pytest.mark.parametrize(
    "options",
    [{}, {"slot_bits": 8}, {"catch_up": True}, {"catch_up": True, "slot_bits": 8}],
    ids=str,
)
def test_rows_without_a_gradient_keep_their_means(options: Any, xp: Any) -> None:
    table = variable_on(xp, drawn(0, (6, 4)))
    optimizer = gpuopt.AdamOptimizer(0.1, **SMOOTHED, **options)
    expected = np.zeros((6, 4))
    for step, row in enumerate([2, 2, 5, 3]):
        values = drawn(step, (1, 4))
        expected[row] += (1 - DECAY) * (values[0] - expected[row])
        slices = gpuopt.IndexedSlices(xp.asarray(values), xp.asarray(np.array([row])))
        optimizer.apply_gradients([(slices, table)])
    mean: Any = optimizer.get_slot(table, "mean")
    bound = 0.02 if options.get("slot_bits") else 1e-6
    np.testing.assert_allclose(mean.numpy(), expected, atol=bound)
    assert not mean.numpy()[[0, 1, 4]].any()


@pytest.mark.parametrize("clip", [{"clip_value": 0.5}, {"clip_norm": 2.0}], ids=str)
@pytest.mark.parametrize("kind", [gpuopt.GradientDescentOptimizer, gpuopt.LARSOptimizer])
def test_the_mean_is_clipped(kind: Any, clip: Any, xp: Any) -> None:
    w, v = (variable_on(xp, drawn(0, (300,))) for _ in range(2))
    ours, plain, means = kind(1.0, **clip, **SMOOTHED), kind(1.0), Means()
    for step in range(2):
        v.assign(w.numpy())
        gradient = drawn(step + 1, (300,))
        ours.apply_gradients([(xp.asarray(gradient), w)])
        expected = means.smoothed("w", gradient.astype(np.float64), step)
        if "clip_value" in clip:
            expected = np.clip(expected, -0.5, 0.5)
        else:  # norms are of the gradients as they are given
            expected = expected * 2 / np.linalg.norm(gradient.astype(np.float64))
        plain.apply_gradients([(xp.asarray(expected.astype(np.float32)), v)])
        np.testing.assert_allclose(w.numpy(), v.numpy(), atol=1e-5)


@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_it_goes_with_master_copies(masters: Any, xp: Any) -> None:
    import ml_dtypes

    bfloat16 = ml_dtypes.bfloat16
    w = variable_on(xp, drawn(0, (300,)).astype(bfloat16))
    v = variable_on(xp, w.numpy().astype(np.float32))
    ours, means = gpuopt.AdamOptimizer(0.1, masters=masters, **SMOOTHED), Means()
    plain = gpuopt.AdamOptimizer(0.1)
    for step in range(3):
        gradient = drawn(step + 1, (300,)).astype(bfloat16)
        ours.apply_gradients([(xp.asarray(gradient), w)])
        mean = means.smoothed("w", gradient.astype(np.float64), step)
        plain.apply_gradients([(xp.asarray(mean.astype(np.float32)), v)])
    slot: Any = ours.get_slot(w, "mean")
    assert slot.dtype == np.float32
    np.testing.assert_allclose(slot.numpy(), means.of["w"], atol=1e-6)
    master: Any = ours.get_slot(w, "master")
    np.testing.assert_allclose(master.numpy(), v.numpy(), atol=1e-5)


def test_a_step_that_is_left_out_moves_no_mean(xp: Any) -> None:
    results = []
    for is_bad in (False, True):
        w = variable_on(xp, drawn(0, (300,)))
        optimizer: Any = gpuopt.AdamOptimizer(0.01, **SMOOTHED, on_nonfinite="skip")
        bad = [np.full(300, np.inf, np.float32)] * is_bad
        for gradient in (drawn(1, (300,)), *bad, drawn(2, (300,))):
            optimizer.apply_gradients([(xp.asarray(gradient), w)])
        results.append([w.numpy(), optimizer.get_slot(w, "mean").numpy()])
    np.testing.assert_array_equal(results[0], results[1])


def test_rows_that_are_added_begin_with_means_of_0() -> None:
    table = gpuopt.Variable(drawn(0, (3, 2)), name="table")
    optimizer = gpuopt.AdamOptimizer(0.1, **SMOOTHED)
    optimizer.apply_gradients([(drawn(1, (3, 2)), table)])
    before: Any = optimizer.get_slot(table, "mean")
    kept = before.numpy()
    gpuopt.rows(table).append(np.ones((2, 2), np.float32))
    mean: Any = optimizer.get_slot(table, "mean")
    np.testing.assert_array_equal(mean.numpy(), [*kept, *np.zeros((2, 2))])


@pytest.mark.contract
def test_slots_of_a_stage_are_listed_and_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    w = gpuopt.Variable(drawn(0, (3,)))
    optimizer = gpuopt.AdamOptimizer(0.1, **SMOOTHED)
    optimizer.apply_gradients([(drawn(1, (3,)), w)])
    assert optimizer.get_slot_names() == ["m", "mean", "v"]
    assert main(["show", "adam", "--smoothed-gradient", "0.5"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mean", "float32"] in [line[1:3] for line in lines]


@pytest.mark.contract
def test_slots_of_one_name_are_refused() -> None:
    @gpuopt.update_rule
    def own(var: Any, grad: Any, mean: Any, *, learning_rate: Any) -> None:
        mean += grad
        var -= learning_rate * mean

    class Own(gpuopt.optimizers.base.RuleOptimizer):
        rule = own

        def __init__(
            self, learning_rate: float, **common: Unpack[gpuopt.optimizers.base.Common]
        ) -> None:
            super().__init__(common, learning_rate=learning_rate)

    with pytest.raises(ValueError, match=r"smoothed and own both have slots \['mean'\]"):
        Own(0.1, **SMOOTHED)
