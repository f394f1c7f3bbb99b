"""Gradients are accumulated on each kind of device, in one launch a step and without waiting."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import driver
import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from each_device import variable_on
from emulator.emulator import EmulatorLauncher
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from gpuopt import GradientAccumulationOptimizer, IndexedSlices, Variable, backends
from gpuopt.backends import to_device
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device

pytestmark = pytest.mark.value

SHAPES = [(3, 4), (), (0,), (70, 50), (5,), (131, 257)]
GPU = Device.parse("gpu:0")


def results_on(xp: Any, dtype: Any, is_sparse: bool) -> list[np.ndarray]:
    """Makes two updates of three steps each; returns sums of gradients as gradient descent does."""
    rng = np.random.default_rng(5)
    variables = [
        variable_on(xp, np.zeros(shape, dtype), name=f"w{i}") for i, shape in enumerate(SHAPES)
    ]
    table = variable_on(xp, np.zeros((40, 12), dtype), name="table")
    optimizer = GradientAccumulationOptimizer(
        gpuopt.GradientDescentOptimizer(np.float64(1)), 3, most_rows=500
    )
    for step in range(6):
        pairs: list[Any] = [
            (xp.asarray(np.asarray(rng.normal(size=v.shape)).astype(dtype)), v)
            for v in variables[step % 2 :]
        ]
        rows, values = rng.integers(0, 40, 300), rng.normal(size=(300, 12)).astype(dtype)
        if is_sparse:
            pairs.append((IndexedSlices(xp.asarray(values), xp.asarray(rows)), table))
        optimizer.apply_gradients(pairs)
    return [each.numpy() for each in (*variables, table)]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "mixed"])
@every_dtype
def test_every_device_adds_up_alike(dtype: Any, is_sparse: bool, xp: Any) -> None:
    got, expected = results_on(xp, dtype, is_sparse), results_on(np, dtype, is_sparse)
    for mine, theirs in zip(got[:-1], expected[:-1], strict=True):
        assert mine.tobytes() == theirs.tobytes()
    # Equal rows are added up in another order.
    tolerance = 64 * float(ml_dtypes.finfo(dtype).eps)
    got, expected = ([each.astype(np.float64) for each in both] for both in (got, expected))
    np.testing.assert_allclose(got[-1], expected[-1], rtol=tolerance, atol=tolerance)


@pytest.mark.emulator
def test_a_step_is_one_launch_and_the_host_waits_for_none(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [Variable(np.ones(s, np.float32), device="gpu:0") for s in [(3,), (40, 50)] * 4]
    gradients = [v.storage.copy() for v in variables]
    averages = gpuopt.ExponentialMovingAverage(0.9)
    inner = gpuopt.AdamWOptimizer(0.01, 0.1, clip_norm=1.0, averages=averages)
    optimizer = GradientAccumulationOptimizer(inner, 3)
    launches, waits = [], []
    for _ in range(12):
        before = emulated_gpus[0].launches, fake_cupy.counts.synchronisations
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        launches.append(emulated_gpus[0].launches - before[0])
        waits.append(fake_cupy.counts.synchronisations - before[1])
    # The mean, its norm, and the update with decay and averages.
    assert launches[6:] == [1, 1, 3] * 2
    assert not any(waits[6:])


@pytest.mark.emulator
def test_slices_wait_for_nothing_until_there_are_many(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    table = Variable(np.zeros((50, 4), np.float32), device="gpu:0")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 3, "sum")
    values = to_device(np.ones((3, 4), np.float32), GPU)
    slices = IndexedSlices(values, to_device(np.array([1, 4, 1]), GPU))
    optimizer.apply_gradients([(slices, table)])
    before = emulated_gpus[0].launches, fake_cupy.counts.synchronisations
    optimizer.apply_gradients([(slices, table)])
    assert (emulated_gpus[0].launches, fake_cupy.counts.synchronisations) == before
    optimizer.apply_gradients([(slices, table)])
    assert table.numpy()[[0, 1, 4], 0].tolist() == [0, -6, -3]


@pytest.mark.emulator
@pytest.mark.parametrize("most_rows", [1, 65536])
def test_a_bad_row_refuses_the_update_and_drops_what_was_accumulated(
    emulated_gpus: list[EmulatorLauncher], most_rows: int
) -> None:
    table = Variable(np.ones((50, 4), np.float32), device="gpu:0", name="table")
    dense = Variable(np.ones(4, np.float32), device="gpu:0")
    counter = Variable(np.int64(0))
    optimizer = GradientAccumulationOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), 2, most_rows=most_rows
    )
    values, one = (to_device(np.ones(shape, np.float32), GPU) for shape in ((3, 4), (4,)))

    def steps(*rows: int) -> None:
        slices = IndexedSlices(values, to_device(np.array(rows), GPU))
        for _ in range(2):
            optimizer.apply_gradients([(slices, table), (one, dense)], counter)
        optimizer.check()

    with pytest.raises(IndexError, match="row 50 is not in"):
        steps(1, 50, 3)
    assert (table.numpy() == 1).all()
    assert (dense.numpy() == 1).all()
    assert (counter.numpy(), optimizer.accumulated_steps) == (0, 0)
    steps(1, 2, 3)
    assert (dense.numpy() == 0).all()
    assert counter.numpy() == 1


@pytest.mark.emulator
def test_each_gpu_and_the_host_have_their_own_sums(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    variables = [
        Variable(np.zeros(3, np.float32), device=place) for place in ("gpu:0", "gpu:1", "cpu")
    ]
    optimizer = GradientAccumulationOptimizer(
        gpuopt.GradientDescentOptimizer(1.0, clip_norm=1e3), 2
    )
    for number in (1, 3):
        optimizer.apply_gradients(
            [(to_device(np.float32([1, 2, number]), v.device), v) for v in variables]
        )
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), [-1, -2, -2], rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize("most_rows", [2, 65536], ids=["rows added up", "rows kept"])
def test_steps_and_updates_may_come_on_any_stream(most_rows: int) -> None:
    streams = [new_stream() for _ in range(3)]
    weight = Variable(np.zeros(50, np.float32), device="gpu:0")
    table = Variable(np.zeros((6, 4), np.float32), device="gpu:0")
    gradients = [uploaded(np.full(50, number, np.float32)) for number in range(1, 7)]
    values, rows = uploaded(np.ones((3, 4), np.float32)), uploaded(np.array([0, 2, 2]))
    optimizer = GradientAccumulationOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), 3, "sum", most_rows=most_rows
    )
    wait_for_gpus()
    for number, gradient in enumerate(gradients):
        with streams[number % 3]:
            optimizer.apply_gradients([(gradient, weight), (IndexedSlices(values, rows), table)])
    assert (weight.numpy() == -21).all()
    assert table.numpy()[:, 0].tolist() == [-6, 0, -12, 0, 0, 0]


# What asks, and what is counted under another name, too.
QUERIES = {"cudaGetDevice", "cudaSetDevice", "cudaEventQuery", "cudaStreamIsCapturing"}
TWICE = {"cuLaunchKernel", "cudaMemcpyAsync"}
# Of what an update has read: they go when the next step writes the sums.
OLD_EVENTS = {"cudaEventDestroy"}
ONE_LAUNCH = {"launches": 1, "cudaEventRecord": 1}


@pytest.mark.gpu
@pytest.mark.driver
@pytest.mark.parametrize(
    ("dtype", "num_variables", "extra"),
    [
        (np.float32, 3, {}),
        (np.float32, 148, {}),
        (np.float16, 3, {}),
        (np.float16, 148, {}),
    ],
)
def test_what_a_steady_step_asks_cuda_for(
    dtype: Any, num_variables: int, extra: dict[str, int]
) -> None:
    """A step between updates is a launch: no copy, no wait, no memory. An update is one more."""
    with backends.using(GPU, cuda_backend(GPU)):
        variables = [Variable(np.zeros(9, dtype), device="gpu:0") for _ in range(num_variables)]
        pairs = [(uploaded(np.ones(9, dtype)), variable) for variable in variables]
        optimizer = GradientAccumulationOptimizer(gpuopt.AdamOptimizer(), 3)
        called = []
        for _ in range(12):
            before = driver.counts()
            optimizer.apply_gradients(pairs)
            after = driver.counts()
            driver.synchronize()
            numbers = {name: after[name] - before.get(name, 0) for name in after}
            ignored = QUERIES | TWICE | OLD_EVENTS
            called.append({k: n for k, n in numbers.items() if n and k not in ignored})
    assert called[6:8] == [{**ONE_LAUNCH, **extra}] * 2
    assert called[8]["launches"] == 2
    assert not [name for name in called[8] if "ynchronize" in name or "alloc" in name.lower()]


def scaled_and_plain(xp: Any, dtype: Any) -> list[tuple[Any, dict[str, Variable]]]:
    """Returns two optimizers that accumulate, of which the first scales losses by 8."""
    made = []
    for scales in (True, False):
        variables = {
            name: variable_on(xp, np.zeros(shape, dtype), name=name)
            for name, shape in {"w": (300,), "b": (), "table": (7, 3)}.items()
        }
        inner: Any = gpuopt.MomentumOptimizer(0.5, 0.5)
        if scales:
            inner = gpuopt.LossScaleOptimizer(inner, gpuopt.DynamicLossScale(8.0, 2))
        made.append((GradientAccumulationOptimizer(inner, 3), variables))
    return made


@pytest.mark.parametrize("scale", [8.0, 3.0])
@every_dtype
@pytest.mark.one_in(3)
def test_scaled_gradients_are_divided_as_they_are_added(scale: float, dtype: Any, xp: Any) -> None:
    (ours, mine), (plain, theirs) = scaled_and_plain(xp, dtype)
    rng = np.random.default_rng(3)
    for _ in range(7):
        pairs: list[list[tuple[Any, Variable]]] = [[], []]
        for name in mine:
            shape = (4, 3) if name == "table" else mine[name].shape
            gradient = rng.integers(-9, 10, shape) / 16
            rows = np.array([1, 5, 1, 0])
            for given, variables, factor in ((pairs[0], mine, scale), (pairs[1], theirs, 1.0)):
                array = xp.asarray(np.asarray(gradient * factor).astype(dtype))
                made = IndexedSlices(array, xp.asarray(rows)) if name == "table" else array
                given.append((made, variables[name]))
        ours.apply_gradients(pairs[0], loss_scale=np.float32(scale))
        plain.apply_gradients(pairs[1])
    for name, variable in mine.items():
        # The reciprocal of a scale is a float32.
        eps = max(float(ml_dtypes.finfo(each).eps) for each in (dtype, np.float32))
        tolerance = 0 if scale == 8.0 else 16 * eps
        got, expected = (each.numpy().astype(np.float64) for each in (variable, theirs[name]))
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_a_loss_that_is_scaled_is_accumulated_as_one_that_is_not() -> None:
    (ours, mine), (plain, theirs) = scaled_and_plain(np, np.float32)
    inputs = np.random.default_rng(4).integers(-4, 5, (7, 300)).astype(np.float32)
    for values in inputs:
        for optimizer, variables in ((ours, mine), (plain, theirs)):
            w, b, table = variables.values()

            def loss(w: Any = w, b: Any = b, table: Any = table, x: Any = values) -> Any:
                return np.sum((w - x) ** 2) / 64 + np.sum((table + b) ** 2)

            optimizer.minimize(loss)
    for name, variable in mine.items():
        np.testing.assert_array_equal(variable.numpy(), theirs[name].numpy())


@pytest.mark.gpu
@pytest.mark.skipif(not driver.is_here(), reason="launches are counted on the driver")
@pytest.mark.parametrize("wrapped", ["accumulation", "replicas"])
def test_a_scaled_loss_costs_no_launch_for_each_tensor(wrapped: str) -> None:
    """What it costs is as much for 8 tensors as for 2, but for a copy that comes back or not."""
    cupy: Any = pytest.importorskip("cupy")

    def count(num_tensors: int, scales: bool) -> int:
        optimizer: Any = gpuopt.MomentumOptimizer(0.1, 0.9)
        if scales:
            optimizer = gpuopt.LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 4))
        with backends.using(GPU, cuda_backend(GPU)):
            if wrapped == "accumulation":
                optimizer = GradientAccumulationOptimizer(optimizer, 3)
                made = [Variable(cupy.zeros(4, np.float32)) for _ in range(num_tensors)]

                def step() -> None:
                    optimizer.minimize(lambda: sum(cupy.sum(w * w) for w in made), var_list=made)
            else:
                strategy = gpuopt.MirroredStrategy(["gpu:0"])
                copies = [strategy.variable(np.zeros(4, np.float32)) for _ in range(num_tensors)]

                def train() -> None:
                    mine = [w.local for w in copies]
                    optimizer.minimize(lambda: sum(cupy.sum(w * w) for w in mine), var_list=mine)

                def step() -> None:
                    strategy.run(train)

            for _ in range(8):
                step()
            with driver.record_launches() as launches:
                step()
        return len(launches)

    more = {num: count(num, scales=True) - count(num, scales=False) for num in (2, 8)}
    assert abs(more[2] - more[8]) <= 2


@pytest.mark.gpu
def test_scales_that_change_are_read_on_every_stream(every_schedule: str) -> None:
    cupy: Any = pytest.importorskip("cupy")
    streams = [new_stream() for _ in range(3)]
    states = []
    for xp in (np, cupy):
        w, table = (variable_on(xp, np.zeros(shape, np.float32)) for shape in (300, (7, 3)))
        scaling = gpuopt.LossScaleOptimizer(
            gpuopt.MomentumOptimizer(0.5, 0.5), gpuopt.DynamicLossScale(2.0, 1)
        )
        optimizer = GradientAccumulationOptimizer(scaling, 2)
        rng = np.random.default_rng(6)
        for call in range(20):
            # As `minimize` does: the host need not know the scale.
            scale = scaling._scale_of_loss(None)
            number = np.float32(2.0 ** (1 + call // 2))
            values, rows = rng.integers(-9, 10, 300) / 16, rng.integers(0, 7, 4)
            with streams[call % 3] if xp is cupy else nullcontext():
                given = [
                    (xp.asarray(np.float32(values * number)), w),
                    (IndexedSlices(xp.full((4, 3), number), xp.asarray(rows)), table),
                ]
                optimizer.apply_gradients(given, loss_scale=scale)
        states.append([w.numpy(), table.numpy(), scaling.loss_scale])
    for got, expected in zip(*states, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_rows_out_of_range_are_found_before_an_update_by_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Variable(np.ones((5, 4), np.float32), device="gpu:0", name="table")
    optimizer = GradientAccumulationOptimizer(gpuopt.GradientDescentOptimizer(1.0), 3)
    values = to_device(np.ones((2, 4), np.float32), GPU)
    good, bad = (IndexedSlices(values, to_device(np.array([1, row]), GPU)) for row in (2, 9))
    optimizer.apply_gradients([(good, table)])
    optimizer.check()
    optimizer.apply_gradients([(bad, table)])
    for save in (gpuopt.Saver([table], optimizers=[optimizer]).save, optimizer.state_dict):
        with pytest.raises(IndexError, match=r'"table" that is accumulated has the row 9, which'):
            save(*([tmp_path / "model"] if save != optimizer.state_dict else []))
    assert optimizer.accumulated_steps == 2
    with pytest.raises(IndexError, match=r"row 9, which is not in \[0, 5\)") as raised:
        optimizer.check()
    assert "accumulated in 2 calls was dropped" in "".join(raised.value.__notes__)
    assert optimizer.accumulated_steps == 0
    monkeypatch.setenv("GPUOPT_CHECK", "1")
    optimizer.apply_gradients([(good, table)])
    with pytest.raises(IndexError, match='gradient for "table": row 9'):
        optimizer.apply_gradients([(bad, table)])
    assert optimizer.accumulated_steps == 0
