"""Contrib's optimizers of workers on GPUs whose streams run late, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import workers
from communicator_kinds import LONG_S
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.distributed import Communicator, ThreadGroup

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_schedule")]


def cupy_device(number: int) -> Any:
    import cupy

    return cupy.cuda.Device(number)


def train(kind: str, communicator: Communicator, device: str, steps: int = 5) -> Any:
    """Trains with each step on a stream of its own; returns what the worker has in the end."""
    rank, on_gpu = communicator.rank, device != "cpu"
    getter = workers.make_getter(kind, communicator, device)
    w = getter.variable(np.arange(40, dtype=np.float32), name="w")
    table = getter.variable(np.ones((4, 2), np.float32), name="table")
    optimizer = workers.make_optimizer(kind, getter, gpuopt.MomentumOptimizer(0.5, 0.5), period=2)
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    number = int(device.removeprefix("gpu:")) if on_gpu else 0
    gradient = np.full(40, 2.0 * rank - 1, np.float32)
    for i in range(steps):
        values, rows = workers.rows_of(rank, i)
        values = np.round(values * 4).astype(np.float32) / 4
        if not on_gpu:
            optimizer.apply_gradients([(gradient, w), (IndexedSlices(values, rows), table)], step)
            continue
        with cupy_device(number), new_stream(number):
            there = [uploaded(each, None, number) for each in (gradient, values, rows)]
            slices = IndexedSlices(there[1], there[2])
            optimizer.apply_gradients([(there[0], w), (slices, table)], step)
            del there, slices
    arrays = [v.numpy() for v in (w, table, getter.center(w), getter.center(table))]
    return [array.tolist() for array in arrays], int(step)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("agn", ["gpu:0", "gpu:0"]),
        *(
            pytest.param(kind, ["gpu:0", "gpu:1"], marks=pytest.mark.gpus(2))
            for kind in workers.KINDS
        ),
    ],
)
def test_workers_on_gpus_do_what_those_on_the_cpu_do(kind: str, devices: list[str]) -> None:
    group = ThreadGroup(len(devices), LONG_S)
    on_gpus = group.run(lambda c: train(kind, c, devices[c.rank]))
    on_cpu = group.run(lambda c: train(kind, c, "cpu"))
    for (arrays, count), (expected, expected_count) in zip(on_gpus, on_cpu, strict=True):
        assert count == expected_count
        for array, other in zip(arrays, expected, strict=True):
            # Values of a few quarters, halved a few times: a GPU fuses multiplications and sums.
            np.testing.assert_allclose(array, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["elastic", "model", "agn"])
def test_an_exchange_reads_what_another_stream_has_written(kind: str) -> None:
    def train(device: str) -> list[list[float]]:
        getter = workers.make_getter(kind, device=device)
        made = [getter.variable(np.full(30, 1.0), name=name) for name in "ab"]
        optimizer = workers.make_optimizer(kind, getter, gpuopt.GradientDescentOptimizer(0.5))
        step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
        for i in range(7):
            gradient, variable = np.full(30, 1.0 + i), made[i % 2]
            if device == "cpu":
                optimizer.apply_gradients([(gradient, variable)], step)
                continue
            with new_stream():
                optimizer.apply_gradients([(uploaded(gradient), variable)], step)
        everything = [*made, *(getter.center(variable) for variable in made)]
        return [variable.numpy().tolist() for variable in everything]

    np.testing.assert_allclose(train("gpu:0"), train("cpu"), rtol=1e-12)


@pytest.mark.parametrize(("kind", "bad_row"), [("elastic", 4), ("agn", 4), ("agn", -1)])
def test_a_refused_step_leaves_nothing_and_is_told_before_the_exchange(
    kind: str, bad_row: int
) -> None:
    getter = workers.make_getter(kind, device="gpu:0")
    table = getter.variable(np.ones((4, 2), np.float32), name="table")
    optimizer = workers.make_optimizer(kind, getter, gpuopt.GradientDescentOptimizer(1.0), period=2)
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    values = uploaded(np.ones((2, 2), np.float32))
    optimizer.apply_gradients([(IndexedSlices(values, uploaded([0, 2])), table)], step)
    kept = {v: v.numpy() for v in gpuopt.global_variables()}
    with pytest.raises(IndexError, match=f"row {bad_row} is not in"):
        optimizer.apply_gradients([(IndexedSlices(values, uploaded([0, bad_row])), table)], step)
    for variable, value in kept.items():
        np.testing.assert_array_equal(variable.numpy(), value, variable.name)
    optimizer.apply_gradients([(IndexedSlices(values, uploaded([0, 2])), table)], step)
    assert (int(optimizer.local_step), int(step)) == (2, 1)


def test_stale_gradients_are_dropped_by_a_global_step_on_a_gpu() -> None:
    w = Variable(np.zeros(3, np.float32), name="w", device="gpu:0")
    step = Variable(0, name="global_step", trainable=False, dtype=np.int64, device="gpu:0")
    optimizer = gpuopt.DropStaleGradientOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    gradient = uploaded(-np.ones(3, np.float32))
    wait_for_gpus()
    for local_step in (0, 0, 0, 2):
        with new_stream():
            optimizer.apply_gradients([(gradient, w)], step, local_step=local_step)
    assert w.numpy().tolist() == [3] * 3
    assert (int(step), float(optimizer.stale_counter)) == (3, 1)
