"""The GPU benchmark, run on the CPU: contenders agree, and numbers are what their names say."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from time import sleep
from typing import Any

import fake_cupy
import numpy as np
import pytest
import textbook
from rich.console import Console
from tiny_benchmark import LOOKUPS, TABLE, make_tiny

import bench.gpu
import gpuopt
from bench import gpu_harness
from bench.gpu import run_offer
from bench.gpu_harness import measure
from bench.harness import write_results
from bench.targets import Target, find_measured, is_missed, judge
from bench.workloads import GPU_TARGETS, offer_gpu_workloads
from gpuopt.bench import peers
from gpuopt.bench.clock import HostClock
from gpuopt.bench.contenders import (
    make_elementwise_step,
    make_naive_step,
    make_our_step,
)
from gpuopt.bench.jobs import (
    BETA1,
    BETA2,
    DECAY,
    EPSILON,
    JOBS,
    LAZY_ADAM,
    RATE,
    WEIGHT_DECAY,
    Job,
    Place,
)
from gpuopt.bench.machine import describe_commit
from gpuopt.bench.measure import Bench, Copies, make_run
from gpuopt.bench.models import draw_lookups
from gpuopt.bench.peers import NUMPY_ALONE, make_torch_step
from gpuopt.bench.profiler import profile
from gpuopt.bench.report import print_run
from gpuopt.bench.results import Run, make_figures, read_results
from gpuopt.bench.workloads import Workload

pytestmark = pytest.mark.internal

ROOT = Path(__file__).resolve().parents[2]
HOST = Place(np, "cpu")
COPIES = Copies([1.0, 2.0, 4.0], 2 * 10**6)
SETTINGS: dict[str, dict[str, float]] = {
    "adam": {"learning_rate": RATE, "beta1": BETA1, "beta2": BETA2, "epsilon": EPSILON},
    "adam_w": {
        "learning_rate": RATE,
        "beta1": BETA1,
        "beta2": BETA2,
        "epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY,
    },
    "momentum": {"learning_rate": RATE, "momentum": DECAY},
    "adagrad": {"learning_rate": RATE, "initial_accumulator_value": 0.1},
    "rms_prop": {"learning_rate": RATE, "decay": DECAY, "momentum": BETA1, "epsilon": 1e-10},
    "sgd": {"learning_rate": RATE},
}
# Contenders decay by the learning rate times a number, as torch does.
TEXTBOOK = {"adam_w": "torch_adam_w", "sgd": "gradient_descent"}


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_harness, "_MOST_SAMPLE_MS", 1.0)


jobs = pytest.mark.parametrize("job", JOBS)


# Contenders


class CompiledKernel:
    """cupy.ElementwiseKernel for float32 in host memory: the same C++ body, by g++, in a loop."""

    folder: Path

    def __init__(self, inputs: str, outputs: str, body: str, name: str) -> None:
        names = [part.removeprefix("T ") for part in (*inputs.split(", "), *outputs.split(", "))]
        self._num_outputs = outputs.count("T ")
        scalars, arrays = names[1 : -self._num_outputs], names[-self._num_outputs :]
        parameters = [
            "const float* grad_",
            *(f"float {scalar}" for scalar in scalars),
            *(f"float* {array}_" for array in arrays),
        ]
        elements = "".join(f"float& {array} = {array}_[i];" for array in arrays)
        source = (
            "#include <cmath>\nusing std::sqrt;\n"
            f'extern "C" void {name}(long n, {", ".join(parameters)}) {{'
            f"for (long i = 0; i < n; ++i) {{ const float grad = grad_[i]; {elements} {body} }} }}"
        )
        path = self.folder / f"{name}{abs(hash(source))}"
        path.with_suffix(".cpp").write_text(source)
        command = ["g++", "-shared", "-fPIC", "-Wall", "-Werror", "-o", f"{path}.so"]
        subprocess.run([*command, f"{path}.cpp"], check=True)
        self._function = getattr(ctypes.CDLL(f"{path}.so"), name)

    def __call__(self, grad: np.ndarray, *others: Any) -> None:
        arrays = others[-self._num_outputs :]
        self._function(
            ctypes.c_long(grad.size),
            grad.ctypes.data_as(ctypes.c_void_p),
            *(ctypes.c_float(scalar) for scalar in others[: -self._num_outputs]),
            *(array.ctypes.data_as(ctypes.c_void_p) for array in arrays),
        )


class NumpyWithKernels:
    ElementwiseKernel = CompiledKernel

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture
def numpy_with_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NumpyWithKernels:
    monkeypatch.setattr(CompiledKernel, "folder", tmp_path, raising=False)
    return NumpyWithKernels()


def steps_are_the_textbooks(job: str, make: Any) -> None:
    """Makes four steps on two weights, with two sets of gradients in turn."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=size).astype(np.float32) for size in (5, 3)]
    sets = [[rng.normal(size=w.shape).astype(np.float32) for w in weights] for _ in range(2)]
    starts = [w.astype(np.float64) for w in weights]
    step = make(JOBS[job], weights, sets)
    for _ in range(4):
        step()
    for i, (got, start) in enumerate(zip(weights, starts, strict=True)):
        history = [(t + 1, sets[t % 2][i].astype(np.float64)) for t in range(4)]
        expected = getattr(textbook, TEXTBOOK.get(job, job))(start, history, **SETTINGS[job])["var"]
        assert not np.allclose(expected, start, atol=1e-4)
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


@jobs
def test_gpuopts_steps_are_the_textbooks(job: str) -> None:
    steps_are_the_textbooks(job, lambda job, *rest: make_our_step(job.ours, *rest))


@jobs
def test_array_operations_are_the_textbooks(job: str) -> None:
    steps_are_the_textbooks(job, lambda *rest: make_naive_step(rest[0], np, *rest[1:]))


@jobs
@pytest.mark.cxx
def test_the_kernel_for_each_parameter_is_the_textbooks(
    job: str, numpy_with_kernels: NumpyWithKernels
) -> None:
    steps_are_the_textbooks(
        job, lambda *rest: make_elementwise_step(rest[0], numpy_with_kernels, *rest[1:])
    )


@jobs
@pytest.mark.torch
@pytest.mark.parametrize("form", ["fused", "foreach"])
def test_torchs_steps_are_the_textbooks(job: str, form: str) -> None:
    if job == "rms_prop":
        pytest.skip("torch's begins with averages of 0")
    steps_are_the_textbooks(
        job, lambda job, *rest: make_torch_step(partial(job.torch, form={form: True}), *rest)
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own tensors
@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.torch), "arrays"])
@pytest.mark.parametrize("job", [LAZY_ADAM, JOBS["adagrad"]], ids=["adam", "adagrad"])
def test_sparse_contenders_compute_the_same(job: Job, kind: str) -> None:
    rng = np.random.default_rng(1)
    start = rng.normal(size=(20, 3)).astype(np.float32)
    values = rng.normal(size=(9, 3)).astype(np.float32)
    gradients = [[gpuopt.IndexedSlices(values, np.array([4, 1, 4, 19, 0, 1, 4, 7, 7]))]]
    ours, its = start.copy(), start.copy()
    steps = [make_our_step(job.ours, [ours], gradients)]
    if kind == "torch":
        steps.append(make_torch_step(partial(job.torch, form={}), [its], gradients))
    else:
        steps.append(make_naive_step(job, np, [its], gradients))
    for _ in range(3):
        for step in steps:
            step()
    assert not np.allclose(ours, start, atol=1e-4)
    np.testing.assert_allclose(its, ours, rtol=1e-5, atol=1e-6)


# Workloads


def test_each_workload_fits_an_h200() -> None:
    reasons = {offer.name: offer.why_not(120 * 10**9) for offer in offer_gpu_workloads(HOST)}
    assert reasons == dict.fromkeys(reasons)
    # gpuopt, torch and array operations each have a table and two slots.
    [offer] = offer_gpu_workloads(HOST, "gpu_sparse_lazyadam")
    assert offer.why_not(3 * 3 * 4 * 10_000_000 * 128) is not None


def test_every_target_names_a_workload_and_a_contender() -> None:
    names = {offer.name for offer in offer_gpu_workloads(HOST)}
    assert {target.workload for target in GPU_TARGETS} <= names
    for target in GPU_TARGETS:
        peer = "torch sparse" if "sparse" in target.workload else "torch fused"
        assert target.against == (peer if target.quantity.endswith(".ratio") else None)
        assert (target.at_most is None) != (target.at_least is None)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.usefixtures("short_samples")
def test_every_workload_runs_and_is_judged(tmp_path: Path) -> None:
    offers = list(offer_gpu_workloads(HOST, resize=make_tiny))
    runs = {offer.name: run_offer(offer, HostClock(), COPIES, seconds=0) for offer in offers}
    for name, run in runs.items():
        assert {"gpuopt", "array operations"} <= run.contenders.keys()
        print_run(Console(file=StringIO()), name, run)
    assert sum(len(run.targets) for run in runs.values()) == len(GPU_TARGETS)
    path = write_results(runs, "Some GPU", tmp_path, commit="abc")
    assert path.parent == tmp_path / "some-gpu"
    assert path.name.endswith("-abc.json")
    written = read_results(path)
    assert (written.commit, written.runs) == ("abc", runs)
    assert all((run.copy_ms, run.copy_gb_per_s) == ([1.0, 2.0, 4.0], 1.0) for run in runs.values())
    ours = written.runs["gpu_adam_160m"].contenders["gpuopt"]
    assert len(ours.times["device"].samples_ms) >= 3
    assert ours.gb_per_s > 0


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus", "short_samples")
def test_every_workload_runs_on_arrays_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves torch out, which cannot use the stand-in's arrays."""
    monkeypatch.setattr(peers, "why_not_torch", lambda *_: "not on this one")
    for offer in offer_gpu_workloads(Place(fake_cupy, "cpu"), resize=make_tiny):
        run = run_offer(offer, HostClock(), COPIES, seconds=0)
        assert set(run.contenders) == {"gpuopt", "array operations"}
        assert all(name.startswith("torch") for name in run.left_out)


@pytest.mark.usefixtures("short_samples")
def test_results_are_written_after_each_workload_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offers = list(offer_gpu_workloads(HOST, "gpu_momentum_*", make_tiny))

    def broken() -> Any:
        raise MemoryError("no memory is left")

    some = [offers[0]._replace(name="broken", make=broken), *offers]
    for name, value in {
        "why_no_gpu": lambda: None,
        "prepare": lambda device: Bench("Some GPU", HOST, HostClock(), lambda: int, 1000),
        "offer_gpu_workloads": lambda place, pattern: iter(some),
        "measure_first_steps": lambda: {},
    }.items():
        monkeypatch.setattr(bench.gpu, name, value)
    arguments = ["--output", str(tmp_path), "--commit", "abc", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    assert bench.gpu.main() == 1
    [path] = tmp_path.glob("some-gpu/*-abc.json")
    written = read_results(path)
    assert written.machine["gpu"] == written.device == "Some GPU"
    assert written.not_run == {"broken": "MemoryError: no memory is left"}
    assert set(written.runs) == {offer.name for offer in offers}
    again = read_results(write_results({"broken": one()}, "Some GPU", tmp_path, commit="abc"))
    assert (again.not_run, set(again.runs)) == ({}, {offer.name for offer in some})
    printed = capsys.readouterr().out
    assert "gpu_momentum_160m: device.ratio against torch fused <= 1" in printed
    assert "Momentum on one tensor of 160,000,000 elements" in printed


@pytest.mark.usefixtures("short_samples")
def test_bytes_moved_counts_each_array_once_for_each_read_and_write() -> None:
    found = {
        offer.name: run_offer(offer, HostClock(), COPIES, seconds=0).bytes_moved
        for offer in offer_gpu_workloads(HOST, "*[a-z0]_160m", make_tiny)
    }
    elements = 12
    assert found == {
        "gpu_adam_160m": 28 * elements,
        "gpu_momentum_160m": 20 * elements,
        "gpu_adagrad_160m": 20 * elements,
    }
    rows, _ = draw_lookups(TABLE, LOOKUPS)
    unique, width = np.unique(rows).size, TABLE[1]
    of_each = LOOKUPS * width * 4 + 8 * LOOKUPS + 8 * 3 * unique * width
    assert 1 < unique < LOOKUPS
    for name, num_tables in (("gpu_sparse_lazyadam", 1), ("gpu_sparse_lazyadam_10_tables", 10)):
        [sparse] = offer_gpu_workloads(HOST, name, make_tiny)
        assert sparse.make().bytes_moved == num_tables * of_each


def test_a_workload_that_does_not_fit_is_not_run() -> None:
    [offer] = offer_gpu_workloads(HOST, "gpu_adam_gpt2")
    reason = offer.why_not(10**9)
    assert re.fullmatch(r"it needs \d+\.\d GB of memory, and 1\.0 are free", reason or "")
    assert offer.why_not(None) is None


# Numbers


class Script:
    """A clock on which each contender takes the time that the test says, and 1 ms if dirty."""

    can_be_dirty = True

    def __init__(self, device_ms: dict[str, float]) -> None:
        self._device_ms = device_ms
        self.order: list[str] = []
        self.calls: Counter[str] = Counter()
        self.head_starts: list[float] = []

    def contender(self, name: str) -> Any:
        def step() -> None:
            self.calls[name] += 1
            self.order.append(name)

        return step

    def synchronize(self) -> None:
        self.order.append("synchronize")

    def device_ms(self, step: Any, host_ms: float, *, dirty: bool = False) -> float:
        step()
        self.head_starts.append(host_ms)
        return self._device_ms[self.order[-1]] + dirty

    def runs_ahead(self, step: Any, host_ms: float) -> bool | None:
        return True


def test_where_no_space_is_left_a_file_of_results_stays_as_it_was(tmp_path: Path) -> None:
    path = write_results({"one": one()}, "GPU", tmp_path, commit="abc")
    before, limits = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_results({"two": one()}, "GPU", tmp_path, commit="abc")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before


def test_a_commit_is_unknown_where_there_is_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_commit(ROOT) == "unknown"


def test_ratios_shares_and_samples_are_of_device_time() -> None:
    script = Script({"gpuopt": 2.0, "peer": 8.0})
    contenders = {name: script.contender(name) for name in ("gpuopt", "peer")}
    workload = Workload("", contenders, 4_000_000_000)
    found = measure(workload, script, copy_bytes_per_second=4e12, seconds=60, rounds=7)
    run = make_run(workload, found)
    assert find_measured(Target("w", "device.ratio", "peer"), run) == 0.25
    assert found["gpuopt"].gb_per_s == 2000
    assert found["gpuopt"].share_of_copy == 0.5
    assert found["gpuopt"].times["device"].samples_ms == [2.0] * 7
    assert len(found["peer"].times["wall"].samples_ms) == 7
    assert found["gpuopt"].wall_steps == 100  # quick, so none is left out
    assert found["gpuopt"].runs_ahead is True
    assert all(0 <= host_ms <= 200 for host_ms in script.head_starts)
    assert found["peer"].times["device_dirty"].samples_ms == [9.0] * 7
    # 7 rounds of 100 steps, 2 x 7 on the device, and 1 + 3 + 1 + 3 before them.
    assert script.calls == {"gpuopt": 722, "peer": 722}


def test_the_device_is_waited_for_once_in_a_sample_of_100_steps() -> None:
    script = Script({"gpuopt": 1.0})
    measure(Workload("", {"gpuopt": script.contender("gpuopt")}, 1), script, 1e9, 0, rounds=2)
    assert script.order[-102:] == ["synchronize", *["gpuopt"] * 100, "synchronize"]


@pytest.mark.usefixtures("short_samples")
def test_slow_contenders_take_fewer_steps_and_rounds() -> None:
    workload = Workload("", {"gpuopt": lambda: sleep(0.01)}, 1)
    found = measure(workload, HostClock(), 1e9, seconds=0)["gpuopt"]
    assert found.wall_steps == 3
    assert len(found.times["wall"].samples_ms) == 3
    assert found.times["wall"].median_ms >= 10
    assert (found.first_step_ms or 0) >= 10


def one(kinds: Sequence[str] = ("step",)) -> Run:
    """A run in which gpuopt takes 3 ms, without compiled rules 4 ms, and a peer 2 ms."""
    contenders = {
        name: make_figures({kind: [ms] * 5 for kind in kinds}, 2_850_000, 1.0, runs_ahead=False)
        for name, ms in {"gpuopt": 3.0, NUMPY_ALONE: 4.0, "peer": 2.0}.items()
    }
    return make_run(Workload("", {}), contenders)


@pytest.mark.parametrize(
    ("target", "measured", "met"),
    [
        (Target("w", "device.ratio", "peer", at_most=1.5), 1.5, True),
        (Target("w", "wall.ratio", "peer", at_most=0.8), 1.5, False),
        (Target("w", "wall.median_ms", at_most=2.0), 3.0, False),
        (Target("w", "device.share_of_copy", at_least=0.9), 0.95, True),
        (Target("w", "device.share_of_copy", at_least=0.96), 0.95, False),
        (Target("w", "runs_ahead", at_least=1), 0.0, False),
        (Target("w", "device.ratio", "absent", at_most=1.0), None, None),
        (Target("w", "ratio", "peer", 1.45), 1.5, False),
        (Target("w", "extra_ms", "peer", 1.0), 1.0, True),
        (Target("w", "numpy_ratio", "peer", 2.0), 2.0, True),
    ],
    ids=str,
)
def test_targets_are_met_missed_or_not_measured(
    target: Target, measured: float | None, met: bool | None
) -> None:
    run = one(("step", "device", "wall"))
    assert find_measured(target, run) == pytest.approx(measured)
    words = {True: "met ", False: "MISSED ", None: "not measured "}
    assert judge(target, run).startswith(words[met])
    assert judge(target, run).endswith(str(target))
    assert is_missed(target, run) == (met is False)


@pytest.mark.torch
def test_a_profile_names_what_took_longest() -> None:
    import torch

    matrix = torch.ones(300, 300)
    rows = profile(lambda: (matrix @ matrix).sum(), HostClock(), on_gpu=False)
    assert rows[0]["name"] == "aten::mm"
    assert rows[0]["calls"] == 1
    assert rows[0]["us"] > 0


def test_without_a_gpu_the_benchmark_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for arguments, status in (((), 0), (("--require-gpu",), 1)):
        finished = subprocess.run(
            [sys.executable, "-m", "bench.gpu", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert finished.returncode == status
        assert "nothing was measured: " in finished.stdout
