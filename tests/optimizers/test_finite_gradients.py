"""A step that takes a norm knows by it whether gradients are finite: they are read once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from dtypes import every_dtype
from each_device import variable_on
from emulator.emulator import EmulatorLauncher

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import to_device
from gpuopt.backends.cpu import clips
from gpuopt.backends.cpu.limits import CpuLimits

KINDS = ["dense", "sparse", "mixed"]
CLIPPING: dict[str, dict[str, Any]] = {
    "norm": {"clip_norm": 0.5},
    "measured": {"clip_norm": np.inf},
    "groups": {"groups": [ParameterGroup("w1|table", clip_norm=0.25)]},
    "torch": {"clip_norm": 0.5, "clip_form": "torch"},
    "values": {"clip_value": 0.5},
}


class Training:
    """Two dense variables and a table, as a kind of step has them."""

    def __init__(self, xp: Any, kind: str, dtype: Any = np.float32, **options: Any) -> None:
        self._xp, self._kind, self._dtype = xp, kind, np.dtype(dtype)
        self._rng = np.random.default_rng(8)
        shapes = [] if kind == "sparse" else [(3, 4), (70, 5)]
        self.variables = [
            variable_on(xp, np.ones(s, dtype), name=f"w{i}") for i, s in enumerate(shapes)
        ]
        if kind != "dense":
            self.variables.append(variable_on(xp, np.ones((40, 12), dtype), name="table"))
        self.counter = Variable(0, name="global_step", dtype=np.int64)
        self.optimizer = gpuopt.AdamOptimizer(0.1, **options)

    def step(self, bad: str = "", value: float = np.nan) -> None:
        pairs = []
        for variable in self.variables:
            is_table = variable.name.startswith("table")
            shape = (6, 12) if is_table else variable.shape
            gradient = np.asarray(self._rng.normal(size=shape)).astype(self._dtype)
            if variable.name == bad:
                gradient[2, 1] = value
            given = self._xp.asarray(gradient)
            if is_table:
                rows = self._xp.asarray(np.array([4, 1, 4, 7, 1, 4]))
                given = IndexedSlices(given, rows)
            pairs.append((given, variable))
        self.optimizer.apply_gradients(pairs, global_step=self.counter)

    def state(self) -> list[bytes]:
        written = [*self.variables, *self.optimizer.variables(), self.counter]
        return [each.numpy().tobytes() for each in written]


def check_refusals(make: Callable[..., Training]) -> None:
    """Bad steps change nothing, are described by name, and good ones are as without the option."""
    for policy in ("skip", "raise"):
        plain, guarded = make(), make(on_nonfinite=policy)
        names = [variable.name for variable in guarded.variables]
        for number, value in enumerate([np.nan, np.inf, -np.inf]):
            bad = names[number % len(names)]
            before = guarded.state()
            if policy == "raise":
                # A GPU says no more than whose gradient it was, and after the call.
                with pytest.raises(FloatingPointError, match=f'"{bad}" is not finite'):  # noqa: PT012
                    guarded.step(bad, value)
                    guarded.optimizer.check()
            else:
                guarded.step(bad, value)
            # In the first step no slot is made.
            assert guarded.state() == before
            plain._rng = np.random.default_rng(number)
            guarded._rng = np.random.default_rng(number)
            plain.step()
            guarded.step()
            assert guarded.state() == plain.state()
        assert int(guarded.counter) == 3


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(3)
def test_a_bad_gradient_is_named_and_changes_nothing(kind: str, clipping: str, xp: Any) -> None:
    check_refusals(lambda **more: Training(xp, kind, **CLIPPING[clipping], **more))


@every_dtype
def test_bad_gradients_of_all_types_are_named(dtype: Any, xp: Any) -> None:
    check_refusals(lambda **more: Training(xp, "mixed", dtype, clip_norm=0.5, **more))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_host_memory_are_read_once(
    kind: str, every_form_one_by_one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0
    sum_of_squares = clips.sum_of_squares

    def count(arrays: Any, limits: CpuLimits, is_wide: bool) -> np.float64:
        nonlocal num_read
        num_read += sum(array.size for array in arrays)
        return sum_of_squares(arrays, limits, is_wide)

    monkeypatch.setattr(clips, "sum_of_squares", count)
    # Of the table, three different rows.
    size = {"dense": 362, "sparse": 36, "mixed": 398}[kind]
    for options in ({}, {"on_nonfinite": "raise"}, {"on_nonfinite": "skip"}):
        training = Training(np, kind, clip_norm=0.5, **options)
        training.step()
        num_read = 0
        training.step()
        assert num_read == size
    check_refusals(lambda **more: Training(np, kind, clip_norm=0.5, **more))


@pytest.mark.emulator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decides", ["gpu", "host"])
def test_a_guarded_step_has_no_launch_more_and_one_wait_of_the_host_that_decides(
    decides: str, kind: str, emulated_gpus: list[EmulatorLauncher]
) -> None:
    found = {}
    for policy in ("propagate", "skip", "raise"):
        training = Training(fake_cupy, kind, clip_norm=0.5, on_nonfinite=policy)
        if decides == "host":
            training.optimizer.hyperparameters["learning_rate"] = lambda: 0.1
        for _ in range(3):
            launches, waits = emulated_gpus[0].launches, fake_cupy.counts.synchronisations
            training.step()
        found[policy] = (
            emulated_gpus[0].launches - launches,
            fake_cupy.counts.synchronisations - waits,
        )
    launches, waits = found["propagate"]
    assert waits == 0
    assert found["skip"] == found["raise"] == (launches, int(decides == "host"))
    if kind == "dense":
        assert launches == 2


@pytest.mark.emulator
def test_norms_of_several_gpus_that_the_host_looks_at_take_one_wait(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [Variable(np.ones(4, np.float32), name=f"w{i}", device=f"gpu:{i}") for i in (0, 1)]
    optimizer = gpuopt.AdamOptimizer(lambda: 0.1, clip_norm=0.5, on_nonfinite="raise")

    def step(last: float) -> int:
        gradients = [to_device(np.float32([1, 2, 3, last]), v.device) for v in variables]
        gradients[0] = to_device(np.float32([1, 2, 3, 4]), variables[0].device)
        before = fake_cupy.counts.synchronisations
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        return int(fake_cupy.counts.synchronisations - before)

    step(4)
    assert step(4) == 1
    before = [variable.numpy().tobytes() for variable in variables]
    with pytest.raises(FloatingPointError, match=r'"w1" is not finite: 1 of 4.* inf at \[3\]'):
        step(np.inf)
    assert [variable.numpy().tobytes() for variable in variables] == before


@pytest.mark.emulator
def test_a_skipped_step_with_a_bad_row_is_not_undone(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    training = Training(fake_cupy, "mixed", clip_norm=0.5, on_nonfinite="skip")
    training.step()
    before = training.state()
    dense, _, table = training.variables
    device = table.device
    rows = to_device(np.array([1, 40]), device)
    slices = IndexedSlices(to_device(np.ones((2, 12), np.float32), device), rows)
    bad = to_device(np.full(dense.shape, np.nan, np.float32), device)
    good = to_device(np.ones(dense.shape, np.float32), device)
    for gradient in (bad, good):
        training.optimizer.apply_gradients([(gradient, dense), (slices, table)], training.counter)
        with pytest.raises(IndexError, match="row 40 is not in"):
            training.optimizer.check()
        assert training.state() == before


def test_squares_that_are_too_large_are_no_bad_gradients(xp: Any) -> None:
    w = variable_on(xp, np.ones(2, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(
        1.0, clip_norm=1.0, clip_form="torch", on_nonfinite="raise"
    )
    optimizer.apply_gradients([(xp.asarray(np.float32([1e30, 1])), w)])
    assert w.numpy().tolist() == [1, 1]  # gradients of infinite norm are clipped to 0


@pytest.mark.parametrize("clipping", [{}, {"clip_norm": 1.0, "clip_form": "torch"}], ids=str)
def test_equal_rows_that_add_up_to_infinity_are_no_step(clipping: dict[str, Any], xp: Any) -> None:
    table = variable_on(xp, np.zeros((3, 1), np.float32), name="table")
    optimizer = gpuopt.GradientDescentOptimizer(1e-30, on_nonfinite="raise", **clipping)
    values = xp.asarray(np.float32([[3e38], [1], [3e38]]))
    again, apart = (
        [(IndexedSlices(values, xp.asarray(np.array(rows))), table)]
        for rows in ([1, 2, 1], [1, 2, 0])
    )
    expected = 'equal rows of (it|the gradient for "table") add up to what is not'
    with pytest.raises(FloatingPointError, match=expected):  # noqa: PT012
        optimizer.apply_gradients(again)
        optimizer.check()
    assert not table.numpy().any()
    optimizer.apply_gradients(apart)
    assert table.numpy().any() == (not clipping)  # gradients of infinite norm are clipped to 0


def test_a_function_that_gives_the_largest_norm_is_called_in_the_step(xp: Any) -> None:
    calls = []

    def most() -> float:
        calls.append(1)
        return 0.5

    training = Training(xp, "dense", clip_norm=most, on_nonfinite="skip")
    expected = Training(xp, "dense", clip_norm=0.5)
    for _ in range(2):
        training.step()
        expected.step()
    assert len(calls) == 2
    assert training.state() == expected.state()


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "own", [{"clip_norm": 5.0}, {"groups": [ParameterGroup("w", clip_norm=5)]}]
)
def test_a_norm_that_would_make_finite_gradients_nan_is_refused_by_name(
    own: dict[str, Any], device: str
) -> None:
    large, small = np.float32([3e20, 4e20]), np.float32([3, 4])
    for form, moved in (("tensorflow", np.nan), ("torch", 0), ("apex", 0)):
        for policy in ("propagate", "skip", "raise"):
            w = Variable(np.ones(2, np.float32), name="w", device=device)
            optimizer = gpuopt.GradientDescentOptimizer(
                1.0, clip_form=form, on_nonfinite=policy, **own
            )
            step = functools.partial(optimizer.apply_gradients, [(to_device(large, w.device), w)])
            if policy == "raise" and form == "tensorflow":
                with pytest.raises(FloatingPointError, match="the norm is more than its type"):  # noqa: PT012
                    step()
                    optimizer.check()
            else:
                step()
            is_refused = form == "tensorflow" and policy != "propagate"
            np.testing.assert_array_equal(
                w.numpy(), np.float32([1, 1]) - (0 if is_refused else moved)
            )
            w.assign(np.ones(2, np.float32))
            optimizer.apply_gradients([(to_device(small, w.device), w)])
            np.testing.assert_allclose(w.numpy(), [-2, -3], rtol=1e-6)


NAMERS: dict[str, Callable[[], Any]] = {
    "alone": lambda: gpuopt.AdamOptimizer(on_nonfinite="skip"),
    "clipped": lambda: gpuopt.AdamOptimizer(on_nonfinite="skip", clip_norm=1.0),
    "scaled": lambda: gpuopt.LossScaleOptimizer(
        gpuopt.AdamOptimizer(), gpuopt.FixedLossScaleManager(1)
    ),
    "clipped and scaled": lambda: gpuopt.LossScaleOptimizer(
        gpuopt.AdamOptimizer(clip_norm=1.0), gpuopt.DynamicLossScale()
    ),
    "accumulated": lambda: gpuopt.GradientAccumulationOptimizer(
        gpuopt.AdamOptimizer(), 2, on_nonfinite="skip"
    ),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", NAMERS)
def test_the_first_bad_gradient_of_the_list_is_named(kind: str, device: str) -> None:
    shapes = {"half": np.float16, "vector": np.float32, "table": np.float32, "sums": np.float32}
    variables = {
        name: Variable(np.ones((5, 2), dtype), name=name, device=device)
        for name, dtype in shapes.items()
    }
    values = {
        "half": np.full((5, 2), np.inf, np.float16),
        "vector": np.full((5, 2), np.nan, np.float32),
        "table": np.float32([[1, 2], [np.nan, 2]]),
        "sums": np.float32([[3e38, 2], [3e38, 2]]),
    }
    rows = {"table": np.array([1, 3]), "sums": np.array([4, 4])}

    def pair(name: str) -> tuple[Any, Variable]:
        where = gpuopt.device.device_of(variables[name].storage)
        given = to_device(values[name], where)
        if name in rows:
            given = IndexedSlices(given, to_device(rows[name], where))
        return given, variables[name]

    optimizer = NAMERS[kind]()
    assert optimizer.last_nonfinite is None
    for order in itertools.permutations(variables):
        optimizer.apply_gradients([(None, variables[order[-1]]), *map(pair, order[:-1])])
        assert f'"{order[0]}"' in str(optimizer.last_nonfinite)
    for variable in variables.values():
        np.testing.assert_array_equal(variable.numpy(), 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
def test_gradients_of_0_that_are_clipped_to_0_are_refused(device: str) -> None:
    w = Variable(np.ones(2, np.float32), name="w", device=device)
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=0.0, on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"it and clip_norm are 0; .*nothing was changed"):  # noqa: PT012
        optimizer.apply_gradients([(to_device(np.zeros(2, np.float32), w.device), w)])
        optimizer.check()
    optimizer.apply_gradients([(to_device(np.ones(2, np.float32), w.device), w)])
    assert w.numpy().tolist() == [1, 1]
