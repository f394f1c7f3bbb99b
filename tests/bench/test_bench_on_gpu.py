"""`gpuopt bench` on a GPU, real or not there."""

from __future__ import annotations

import pytest

from gpuopt.bench import measure, sampling
from gpuopt.bench.workloads import Task
from gpuopt.device import Device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("task", "others"),
    [
        (Task("small", "two small tensors", [(40, 3), (7,)]), {"a kernel for each parameter"}),
        (Task("rows", "a small table", [(50, 4)], 20), set()),
    ],
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
