"""`gpuopt bench` on a GPU, a real one or one of the stub driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import driver
import numpy as np
import pytest
from fake_nvidia_smi import NvidiaSmi

import gpuopt
from gpuopt.bench import measure, profiler, sampling
from gpuopt.bench.clock import GpuClock
from gpuopt.bench.contenders import make_our_step
from gpuopt.bench.jobs import JOBS
from gpuopt.bench.profiler import count_our_calls
from gpuopt.bench.results import Run
from gpuopt.bench.workloads import Task, make_contenders
from gpuopt.device import Device

pytestmark = pytest.mark.gpu
DENSE = Task("small", "two small tensors", [(40, 3), (7,)])
SPARSE = Task("rows", "a small table", [(50, 4)], 20)
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cupy: Any = pytest.importorskip("cupy")
    monkeypatch.setattr(measure, "_GPU_COPY_BYTES", 2**16)
    monkeypatch.setattr(sampling, "_MOST_STEPS", 2)
    current = cupy.cuda.Device()
    yield
    current.use()


class StandInForThinc:
    """Thinc's Adam on CuPy's arrays, where Thinc is not installed."""

    def __init__(self, learn_rate: float, **_: float) -> None:
        self.mom1: dict[Any, Any] = {}
        self.mom2: dict[Any, Any] = {}

    def __call__(self, key: Any, weights: Any, gradient: Any) -> None:
        for moments in (self.mom1, self.mom2):
            moments[key] = moments.get(key, 0 * weights) + gradient
        weights -= gradient
        gradient *= 0


class StandInForJax:
    """JAX with arrays that are CuPy's. It notes how many steps each wait for their end is for."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        self.unfinished = 0
        self.ends: list[int] = []
        self.used: set[int] = set()
        self._default: Any = None
        self.numpy = SimpleNamespace(array=self._array)
        self.tree = SimpleNamespace(leaves=list)

    def devices(self, kind: str) -> list[Any]:
        if kind not in self.kinds:
            raise RuntimeError(f"Unknown backend: '{kind}' requested")
        return [SimpleNamespace(platform=kind, index=index) for index in range(5)]

    @contextmanager
    def default_device(self, device: Any) -> Iterator[None]:
        before, self._default = self._default, device
        yield
        self._default = before

    def _array(self, array: np.ndarray) -> Any:
        index = self._default.index
        self.used.add(index)
        return gpuopt.Variable(array, device=f"gpu:{index}", trainable=False).value()

    def jit(self, update: Any, **_: Any) -> Any:
        def enqueue(*arguments: Any) -> Any:
            self.unfinished += 1
            return update(*arguments)

        return enqueue

    def block_until_ready(self, arrays: Any) -> Any:
        self.ends.append(self.unfinished)
        self.unfinished = 0
        return arrays


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def thinc(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("thinc") is None:
        install(monkeypatch, "thinc")
        install(monkeypatch, "thinc.api", Optimizer=StandInForThinc)


def install_jax(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> StandInForJax:
    def add_up(given: Any, state: Any, weights: Any) -> Any:
        for each, total in zip(given * 2, state, strict=True):
            total += each
        return given, state

    def apply(weights: Any, moves: Any) -> Any:
        return [weight - move for weight, move in zip(weights, moves, strict=True)]

    adam = SimpleNamespace(
        init=lambda weights: [0 * each for each in weights * 2],
        update=lambda given, state, weights: add_up(given, state, weights),
    )
    jax = StandInForJax(kinds)
    # So that what is set meanwhile is forgotten.
    monkeypatch.setenv(PREALLOCATE, "")
    monkeypatch.delenv(PREALLOCATE)
    monkeypatch.setitem(sys.modules, "jax", jax)
    install(monkeypatch, "optax", adam=lambda *scalars: adam, apply_updates=apply)
    return jax


@pytest.mark.parametrize(
    ("task", "others"),
    [(DENSE, {"a kernel for each parameter"}), (SPARSE, set())],
    ids=["dense", "sparse"],
)
def test_a_task_is_measured_on_a_gpu(task: Task, others: set[str]) -> None:
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
        assert set(figures.times) == {"warm", "cold", "cold_dirty"}
        for times in figures.times.values():
            assert len(times.samples_ms) == 5
            assert min(times.samples_ms) > 0
    assert len(run.copy_ms) == 5


@pytest.mark.parametrize("task", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_our_launches_are_counted_without_torch_and_others_are_said_not_to_be(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    contender = make_our_step(job.ours, weights, [gradients])
    contender.step()
    assert count_our_calls(contender.step, GpuClock(cupy)) == (1, 1)


def measured_on(index: int) -> Run:
    bench = measure.prepare(Device.parse(f"gpu:{index}"))
    return measure.measure(bench, DENSE, "adam", "float32", rounds=5, seconds=0)


@pytest.mark.usefixtures("thinc")
def test_thinc_is_timed_on_the_gpu_and_its_state_is_there() -> None:
    run = measured_on(0)
    assert 0 <= run.contenders["Thinc"].state_bytes - 8 * DENSE.num_parameters <= 64
    assert min(run.contenders["Thinc"].times["cold"].samples_ms) > 0


@pytest.mark.gpus(2)
def test_optax_is_timed_to_its_end_on_the_gpu_that_jax_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = len(visible()) - 1
    jax = install_jax(monkeypatch, "cpu", "gpu")
    run = measured_on(last)
    assert jax.used == {last}
    figures = run.contenders["optax jit"]
    assert figures.state_bytes == 8 * DENSE.num_parameters
    assert (figures.peak_extra_bytes, figures.launches) == (None, None)
    assert run.uncounted["optax jit"] == "it has streams and memory of its own"
    # A cold step, and the three that warm up.
    assert {1, 3} <= set(jax.ends)
    assert os.environ[PREALLOCATE] == "false"


def test_a_jax_without_this_gpu_is_left_out_with_what_installs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_jax(monkeypatch, "cpu")
    bench = measure.prepare(Device.parse("gpu:0"))
    made = make_contenders(DENSE, "adam", "float32", bench.place)
    assert "optax jit" not in made.contenders
    assert made.left_out["optax jit"].startswith(
        "JAX does not find this GPU: pip install 'jax[cuda"
    )


@pytest.mark.gpus(2)
def test_the_throttling_of_the_gpu_that_is_timed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi = NvidiaSmi(tmp_path, monkeypatch)
    bus_ids = visible()
    for bus_id in bus_ids:
        nvidia_smi.answer(bus_id, "0x80")
    nvidia_smi.answer(bus_ids[-1], "0x24")
    run = measured_on(len(bus_ids) - 1)
    assert nvidia_smi.list_asked() == [bus_ids[-1]]
    [warning] = [each for each in run.warnings if "clocks" in each]
    assert warning.endswith("lowered by its power limit and heat (by software)")


def visible() -> list[str]:
    """Returns the PCI bus ids of the GPUs that CUDA shows."""
    cupy: Any = pytest.importorskip("cupy")
    runtime = cupy.cuda.runtime
    return [runtime.deviceGetPCIBusId(index) for index in range(runtime.getDeviceCount())]
