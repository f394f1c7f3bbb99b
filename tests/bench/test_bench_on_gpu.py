"""`gpuopt bench` on a GPU, real or not there."""

from __future__ import annotations

from typing import Any

import driver
import numpy as np
import pytest

import gpuopt
from gpuopt.bench import measure, profiler, sampling
from gpuopt.bench.clock import GpuClock
from gpuopt.bench.contenders import make_our_dense_step
from gpuopt.bench.jobs import JOBS
from gpuopt.bench.profiler import count_our_calls
from gpuopt.bench.workloads import Task, make_contenders
from gpuopt.device import Device

pytestmark = pytest.mark.gpu
DENSE = Task("small", "two small tensors", [(40, 3), (7,)])
SPARSE = Task("rows", "a small table", [(50, 4)], 20)


@pytest.mark.parametrize(
    ("task", "others"),
    [(DENSE, {"a kernel for each parameter"}), (SPARSE, set())],
    ids=["dense", "sparse"],
)
def test_a_task_is_measured_on_a_gpu(
    task: Task, others: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_GPU_COPY_BYTES", 2**16)
    monkeypatch.setattr(sampling, "_MOST_STEPS", 2)
    bench = measure.prepare(Device.parse("gpu:0"))
    assert bench.on_gpu
    assert bench.name != "cpu"
    assert (bench.count_free_bytes() or 0) > 0
    run = measure.measure(bench, task, "adam", "float32", rounds=5, seconds=0)
    assert {"gpuopt", "array operations", *others} <= run.contenders.keys()
    slots = 2 * 4 * task.num_parameters
    for figures in run.contenders.values():
        assert 0 <= figures.state_bytes - slots <= 64
        assert figures.peak_extra_bytes is not None
        assert len(figures.cold.samples_ms) == 5
        assert min(figures.cold.samples_ms) > 0
    assert len(run.copy_ms) == 5


@pytest.mark.parametrize("task", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_our_launches_are_counted_without_torch_and_others_are_said_not_to_be(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_GPU_COPY_BYTES", 2**16)
    monkeypatch.setattr(sampling, "_MOST_STEPS", 2)
    monkeypatch.setattr(profiler, "find_spec", lambda name: None)
    bench = measure.prepare(Device.parse("gpu:0"))
    run = measure.measure(bench, task, "adam", "float32", rounds=5, seconds=0)
    assert run.contenders["gpuopt"].launches == (1 if task is DENSE else 3)
    assert run.contenders["gpuopt"].waits == 0
    others = run.contenders.keys() - {"gpuopt"}
    assert run.uncounted == dict.fromkeys(others, "torch, whose profiler is used, is not installed")
    assert all(run.contenders[name].launches is None for name in others)
    assert any(note.startswith("launches and waits not counted of") for note in run.notes)


@pytest.mark.skipif(not driver.is_here(), reason="a real driver does not count its calls")
@pytest.mark.parametrize("job", ["adam", "adagrad"])
@pytest.mark.parametrize("task", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_our_launches_are_those_that_cuda_is_asked_for(task: Task, job: str) -> None:
    bench = measure.prepare(Device.parse("gpu:0"))
    contender = make_contenders(task, job, "float32", bench.place).contenders["gpuopt"]
    for _ in range(6):
        contender.step()
    before = driver.counts()["launches"]
    contender.step()
    asked = driver.counts()["launches"] - before
    assert count_our_calls(contender.step, bench.clock) == (asked, 0)


def test_a_wait_of_the_host_is_counted() -> None:
    cupy: Any = pytest.importorskip("cupy")
    rate = gpuopt.Variable(np.float32(0.1), name="rate", device="gpu:0")
    job = JOBS["adam"]._replace(ours=lambda: gpuopt.AdamOptimizer(rate.numpy))
    weights, gradients = ([cupy.ones(100, dtype=np.float32)] for _ in range(2))
    contender = make_our_dense_step(job, weights, [gradients])
    contender.step()
    assert count_our_calls(contender.step, GpuClock(cupy)) == (1, 1)
