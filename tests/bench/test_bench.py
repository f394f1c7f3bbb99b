"""`gpuopt bench`: what it times, what its figures are, and its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_nvidia_smi import NvidiaSmi
from rich.console import Console

from gpuopt import __main__ as command_line
from gpuopt.bench import command, measure, peers, sampling, slowdowns
from gpuopt.bench.clock import HostClock
from gpuopt.bench.compare import Comparison, Interval, Verdict
from gpuopt.bench.contenders import Contender
from gpuopt.bench.jobs import JOBS, Place
from gpuopt.bench.memory import measure_host_peak
from gpuopt.bench.models import (
    list_dlrm_tables,
    list_gpt2_shapes,
    list_llama_layer_shapes,
    list_resnet50_shapes,
)
from gpuopt.bench.peers import NUMPY_ALONE
from gpuopt.bench.profiler import Calls, sum_calls
from gpuopt.bench.report import print_comparison, print_growth, print_run
from gpuopt.bench.results import (
    Figures,
    ResultsError,
    Run,
    Times,
    read_results,
    summarize,
    to_json,
    write_results,
)
from gpuopt.bench.sampling import take_samples
from gpuopt.bench.workloads import (
    DTYPES,
    Task,
    list_growing_tasks,
    list_tasks,
    make_contenders,
    why_not,
)

HOST = Place(np, "cpu")
DENSE = Task("small", "two small tensors", [(40, 3), (7,)])
SPARSE = Task("rows", "two small tables", [(50, 4), (30, 2)], 20, "rows")
FEW = ["--rounds", "5", "--seconds", "0", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_HOST_COPY_BYTES", 2**20)
    monkeypatch.setattr(measure, "read_cache_bytes", lambda: 2**16)
    monkeypatch.setattr(sampling, "REST_S", 0.0)


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "list_tasks", lambda: iter([DENSE, SPARSE]))


# What is timed


def test_models_have_the_published_sizes() -> None:
    for shapes, tensors, parameters in (
        (list_llama_layer_shapes(), 9, 202_383_360),
        (list_gpt2_shapes(), 148, 124_439_808),
        (list_resnet50_shapes(), 161, 25_557_032),
    ):
        sizes = [int(np.prod(shape)) for shape in shapes]
        assert (len(sizes), sum(sizes)) == (tensors, parameters)
    tables = list_dlrm_tables()
    assert len(tables) == 26
    assert max(height for height, _ in tables) == 1_000_000


def test_tasks_have_names_of_their_own_and_grow_as_they_say() -> None:
    tasks = [*list_tasks(), *list_growing_tasks()]
    assert len({task.name for task in tasks}) == len(tasks)
    growing = {task.name: task.units for task in list_growing_tasks()}
    assert [growing[f"parameters-2^{n}"] for n in (10, 27)] == [2**10, 2**27]
    assert [growing[f"tensors-{n}"] for n in (1, 10_000)] == [1, 10_000]
    assert [growing[f"rows-10^{n}"] for n in (0, 6)] == [1, 10**6]
    assert growing["height-10^3"] == growing["height-10^7"] == 8192
    found = {task.name: (task.curve, task.at, task.per) for task in list_growing_tasks()}
    assert found["parameters-2^10"] == ("parameters", 2**10, "parameter")
    assert found["tensors-100"] == ("tensors", 100, "tensor")
    assert found["rows-10^2"] == ("rows", 100, "row")
    assert found["height-10^4"] == ("height", 10**4, "row")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("job", JOBS)
def test_contenders_step_with_every_optimizer_and_type(job: str, dtype: str) -> None:
    made = make_contenders(DENSE, job, dtype, HOST)
    assert {"gpuopt", NUMPY_ALONE} <= made.contenders.keys()
    has_no_epsilon = dtype == "float16" and job.startswith("adam")
    assert has_no_epsilon == ("array operations" in made.left_out)
    slots = len(JOBS[job].state)
    itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
    assert made.bytes_moved == 127 * itemsize * (3 + 2 * slots)
    with measure.compiled_as_now():
        for contender in made.contenders.values():
            contender.prepare()
            contender()
            # Adam's powers of beta, and other libraries' counts of steps, are a few numbers more.
            assert 0 <= contender.count_state_bytes() - slots * 127 * itemsize <= 64
    assert made.contenders.keys().isdisjoint(made.left_out)


@pytest.mark.parametrize("task", [DENSE, SPARSE])
@pytest.mark.parametrize("job", ["adam", "adagrad"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_contenders_keep_the_same_state(task: Task, job: str) -> None:
    made = make_contenders(task, job, "float32", HOST)
    sums = {}
    with measure.compiled_as_now():
        for name, contender in made.contenders.items():
            for _ in range(3):
                contender.prepare()
                contender()
            arrays = [np.asarray(array, np.float64) for array in contender.state()]
            sums[name] = sorted(float(np.abs(a).sum()) for a in arrays if a.ndim and a.size > 1)
    for name, found in sums.items():
        assert found == pytest.approx(sums["gpuopt"], rel=1e-4), name


@pytest.mark.parametrize("task", [DENSE, SPARSE])
def test_without_a_compiler_gpuopt_is_timed_once(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "/nowhere")
    made = make_contenders(task, "adam", "float32", HOST)
    assert NUMPY_ALONE not in made.contenders
    assert "no C++ compiler" in made.left_out[NUMPY_ALONE]


def test_what_is_not_installed_is_left_out_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "list_tasks", lambda: iter([DENSE]))
    assert command_line.main(["bench", *FEW]) == 0
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    printed = capsys.readouterr().out
    for requirement in peers.REQUIREMENTS.values():
        assert requirement in (*extras["bench"], *extras["thinc"])
        assert f" is not installed: pip install '{requirement}'" in printed


def test_a_torch_without_cuda_is_left_out_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    torch = SimpleNamespace(float32=None, ones=refuse)
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = peers.why_not_torch(JOBS["adam"], Place(np, "cuda:0"), {}, "float32")
    assert reason == "Torch not compiled with CUDA enabled"


def test_contenders_leave_the_choice_of_compiled_rules_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for before in ("0", None):
        if before is None:
            monkeypatch.delenv("GPUOPT_COMPILED", raising=False)
        else:
            monkeypatch.setenv("GPUOPT_COMPILED", before)
        bench = measure.prepare(command_line._parse_device("cpu"))
        measure.measure(bench, DENSE, "adam", "float32", rounds=5, seconds=0)
        assert os.environ.get("GPUOPT_COMPILED") == before


def test_a_task_says_why_it_cannot_be_run() -> None:
    large = Task("160m", "", [(160_000_000,)])
    assert why_not(large, "adam", "float32", 10**9) == (
        "it needs 17.3 GB of memory, and 1.0 are free"
    )
    assert why_not(large, "adam", "float32", None) is None
    assert "only adam and adagrad" in (why_not(SPARSE, "momentum", "float32", None) or "")
    assert "in float32" in (why_not(SPARSE, "adam", "float16", None) or "")


# Figures


def test_each_contender_is_sampled_in_each_round_after_it_was_prepared() -> None:
    log: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(lambda: log.append(name), list, lambda: log.append(f"prepare {name}"))

    rounds: list[int] = []
    samples = take_samples(
        {name: contender(name) for name in "ab"},
        HostClock(),
        rounds=7,
        seconds=60,
        on_round=lambda: rounds.append(0),
    )
    assert len(rounds) == 7
    assert {len(each[kind]) for each in samples.values() for kind in ("warm", "cold")} == {7}
    for before, after in pairwise(log):
        assert after in (before, f"prepare {after[-1]}", before[-1])


def test_a_contender_that_the_clock_does_not_see_is_timed_to_its_end() -> None:
    left: list[float] = []

    def finish() -> None:
        while left:
            sleep(left.pop())

    unseen = {"unseen": Contender(lambda: left.append(0.002), list, finish=finish)}
    samples = take_samples(unseen, HostClock(), rounds=5, seconds=0, on_round=lambda: None)
    assert min(samples["unseen"]["cold"] + samples["unseen"]["warm"]) >= 2


def test_five_rounds_are_made_where_time_is_over() -> None:
    slow = {"slow": Contender(lambda: sleep(0.001), list)}
    samples = take_samples(slow, HostClock(), rounds=30, seconds=0, on_round=lambda: None)
    assert len(samples["slow"]["cold"]) == 5
    assert min(samples["slow"]["warm"]) >= 1


def test_a_cold_step_finds_its_data_in_no_cache() -> None:
    clock = HostClock(1000)
    before = clock._larger_than_caches.copy()
    clock.device_ms(lambda: None, 0)
    assert np.all(clock._larger_than_caches != before)


def test_the_peak_of_a_step_counts_what_it_has_freed_again() -> None:
    def step() -> None:
        np.ones(2**23)

    step()
    peak = measure_host_peak(step)
    if peak is None:
        pytest.skip("this system does not tell a process's peak of memory")
    assert 2**26 * 0.9 < peak < 2**26 * 1.5


def test_calls_of_cuda_are_summed_by_their_names() -> None:
    counts = {
        "cudaLaunchKernel": 3,
        "cuLaunchKernel": 2,
        "cudaDeviceSynchronize": 1,
        "cudaEventSynchronize": 4,
        "cudaMemcpyAsync": 7,
        "void gpuopt::dense_update<Adam>": 5,
    }
    assert sum_calls(counts) == Calls(launches=5, waits=4)
    assert isinstance(sum_calls({}), str)


def test_what_slows_a_machine_down_is_named() -> None:
    before = {"the CPU was throttled by its heat": 3.0, "stolen seconds": 1.0}
    assert slowdowns.compare_counters(before, before, 10) == []
    after = {"the CPU was throttled by its heat": 4.0, "stolen seconds": 1000.0}
    hot, stolen = slowdowns.compare_counters(before, after, 10)
    assert "heat" in hot
    assert "other guests" in stolen
    assert slowdowns.explain_throttling(0) == []
    assert slowdowns.explain_throttling(0x01) == []  # idle
    assert "power limit and heat" in slowdowns.explain_throttling(0x24)[0]
    assert slowdowns.find_drift([1.0, 1.1, 1.0, 1.1]) == []
    assert "2.00 times" in slowdowns.find_drift([1.0, 1.0, 2.0, 2.0])[0]


def test_what_throttles_the_gpu_that_is_timed_is_seen_while_it_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi = NvidiaSmi(tmp_path, monkeypatch)
    nvidia_smi.answer("0000:01:00.0", "0x80")
    busy: list[str] = []
    throttling = slowdowns.GpuThrottling("0000:02:00.0", lambda: busy.append("a copy"))
    for reasons in ("0x0000000000000004", "0x0000000000000020", "[N/A]"):
        nvidia_smi.answer("0000:02:00.0", "0x40")  # not looked at
        for _ in range(4):
            throttling.note_round()
        nvidia_smi.answer("0000:02:00.0", reasons)
        throttling.note_round()
    assert nvidia_smi.list_asked() == ["0000:02:00.0"] * 3
    [warning] = throttling.explain()
    assert warning.endswith("lowered by its power limit and heat (by software)")
    assert busy


def test_without_nvidia_smi_nothing_is_said_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    throttling = slowdowns.GpuThrottling("0000:02:00.0", lambda: None)
    for _ in range(5):
        throttling.note_round()
    assert throttling.explain() == []


def test_times_that_spread_widely_are_called_noisy() -> None:
    assert not summarize([1.0, 1.01, 1.02, 1.03, 1.04]).is_noisy
    assert summarize([1.0, 1.0, 1.0, 2.0, 2.0]).is_noisy


def a_run() -> Run:
    times = Times(1234.5678, 1200.0, 1300.25, [1234.5678])
    of_both = {"warm": times, "cold": times}
    figures = Figures(of_both, 123.4, 1.62, 204_100_000, 1_021_000_000)
    names = ("gpuopt", NUMPY_ALONE, "torch foreach", "array operations")
    return Run(
        *("a large model", 10**9, None, None, None, None, [1.0], 25.9),
        contenders=dict.fromkeys(names, figures),
    )


@pytest.mark.parametrize(
    ("width", "on_gpu", "shown"),
    [
        (160, True, {"p10", "MB", "GB/s"}),
        (160, False, {"p10", "MB", "GB/s"}),
        (80, False, {"MB", "GB/s"}),
        (80, True, set()),
        (72, True, set()),
    ],
)
def test_a_table_shows_each_figure_whole(width: int, on_gpu: bool, shown: set[str]) -> None:
    run = a_run()
    if on_gpu:
        figures = replace(run.contenders["gpuopt"], launches=123456, waits=5)
        names = ("gpuopt", "a kernel for each parameter")
        run = replace(run, contenders=dict.fromkeys(names, figures), per="parameter", units=1000)
    console = Console(width=width, file=StringIO())
    print_run(console, "resnet-50/adam/float32", run)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("1235") == 2 * len(run.contenders)
    assert text.count("1300") == 2 * len(run.contenders) * ("p10" in shown)
    assert text.count("123456") == on_gpu * len(run.contenders)
    assert {each for each in ("p10", "MB", "GB/s") if each in text} == shown


def test_tables_of_growth_show_each_cost_whole_on_80_columns() -> None:
    run = replace(a_run(), per="parameter", units=10**6, curve="parameters")
    names = ("torch fused", "optax jit", "Thinc")
    contenders = {**run.contenders, **dict.fromkeys(names, run.contenders["gpuopt"])}
    points = {
        f"parameters-{at}/adam/float32": replace(run, contenders=contenders, at=at)
        for at in (1024, 2**27)
    }
    console = Console(width=80, file=StringIO())
    print_growth(console, points)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "growth: parameters/adam/float32, ns a parameter" in shown
    assert shown.count("1,235") == 2 * len(contenders) == 14
    assert "134,217,728" in shown


@pytest.mark.parametrize("width", [72, 100])
def test_a_table_of_verdicts_shows_each_name_and_number_whole(width: int) -> None:
    interval = Interval(0.9, 1.1)
    compared = Comparison("run", NUMPY_ALONE, "warm", 1.0234, interval, Verdict.AMBIGUOUS)
    console = Console(width=width, file=StringIO())
    print_comparison(console, [compared._replace(run="parameters-2^10/adam/float32")], [])
    shown = console.file.getvalue()
    assert "…" not in shown
    assert "0.900 - 1.100" in shown
    assert "AMBIGUOUS" in shown


# The command


@pytest.mark.usefixtures("small_tasks")
def test_the_command_writes_all_samples_and_reads_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    assert command_line.main(["bench", *FEW, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "small/adam/float32: Adam, two small tensors" in printed
    assert "rows/adam/float32: LazyAdam, two small tables" in printed
    written = json.loads(path.read_text())
    assert set(written["runs"]) == {"small/adam/float32", "rows/adam/float32"}
    run = written["runs"]["rows/adam/float32"]
    assert (run["per"], run["units"]) == ("row", 40)
    for figures in run["contenders"].values():
        assert len(figures["warm"]["samples_ms"]) == len(figures["cold"]["samples_ms"]) == 5
        assert figures["gb_per_s"] > 0
    assert len(run["copy_ms"]) == 5
    found = read_results(path)
    assert json.loads(json.dumps(to_json(found))) == written
    write_results(found, path)
    assert read_results(path) == found


@pytest.mark.usefixtures("small_tasks")
def test_what_cannot_be_run_is_listed_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["bench", "rows", "--optimizer", "momentum", *FEW]) == 0
    assert "rows/momentum/float32 was not run: gradients are sparse" in capsys.readouterr().out


@pytest.mark.usefixtures("small_tasks")
def test_a_comparison_ends_with_status_1_if_gpuopt_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, slower = tmp_path / "now.json", tmp_path / "slower.json"
    command_line.main(["bench", "small", "--json", str(now), *FEW])
    written = json.loads(now.read_text())
    [run] = written["runs"].values()
    run["copy_ms"] = [1.0] * 30

    def write(path: Path, ms: dict[str, float]) -> None:
        for name, figures in run["contenders"].items():
            times = asdict(summarize([ms.get(name, 1.0)] * 30))
            figures.update(warm=times, cold=times)
        path.write_text(json.dumps(written))

    write(now, {})
    write(slower, {"gpuopt": 2.0})
    monkeypatch.setattr(command, "prepare", lambda device: pytest.fail("something is timed"))
    monkeypatch.setenv("COLUMNS", "120")
    assert command_line.main(["bench", "--compare", str(now), str(slower)]) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert command_line.main(["bench", "--compare", str(slower), str(now)]) == 0
    assert "FASTER" in capsys.readouterr().out
    assert command_line.main(["bench", "--compare", str(now), str(now)]) == 0
    assert "SAME" in capsys.readouterr().out
    write(slower, {"array operations": 2.0})
    assert command_line.main(["bench", "--compare", str(now), str(slower)]) == 0


@pytest.mark.usefixtures("small_tasks")
def test_what_cannot_be_compared_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    command_line.main(["bench", "small", "--json", str(old), *FEW])
    written = json.loads(old.read_text())
    [run] = written["runs"].values()
    new.write_text(json.dumps({**written, "runs": {"other/adam/float32": run}}))
    compare = ["bench", "--compare", str(old), str(new), "--html", str(tmp_path / "page.html")]
    capsys.readouterr()
    assert command_line.main(compare) == 2
    printed = capsys.readouterr()
    assert "GONE: small/adam/float32" in printed.out
    assert "NEW: other/adam/float32" in printed.out
    assert "no run of gpuopt" in printed.err
    for name in [name for name in run["contenders"] if name.startswith("gpuopt")]:
        del run["contenders"][name]
    new.write_text(json.dumps(written))
    assert command_line.main(compare) == 2
    assert "GONE: small/adam/float32, gpuopt" in capsys.readouterr().out


@pytest.mark.usefixtures("small_tasks")
def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_in_the_second(bench: Any, task: Task, *arguments: Any, **options: Any) -> Run:
        if task is SPARSE:
            raise KeyboardInterrupt
        return measure.measure(bench, task, *arguments, **options)

    monkeypatch.setattr(command, "measure", stop_in_the_second)
    path, page = tmp_path / "results.json", tmp_path / "page.html"
    files = ["--json", str(path), "--html", str(page)]
    assert command_line.main(["bench", *FEW, *files]) == 130
    assert list(read_results(path).runs) == ["small/adam/float32"]
    assert page.is_file()
    assert f"1 of 2 runs are in {path} and {page}" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(command, "prepare", lambda device: pytest.fail("something is timed"))
    for files, words in (
        (["--json", str(tmp_path)], "is a folder"),
        (["--html", os.devnull], "is no regular file"),
        (
            ["--json", str(tmp_path / "a"), "--html", f"{tmp_path}/../{tmp_path.name}/a"],
            "same file",
        ),
        (["--json", str(tmp_path / "a")], "cannot be written: Permission denied"),
    ):
        if "Permission" in words:
            monkeypatch.setattr(command, "TemporaryFile", refuse)
        with pytest.raises(SystemExit) as refused:
            command_line.main(["bench", *files, *FEW])
        assert refused.value.code == 2
        assert words in capsys.readouterr().err


def test_the_tasks_that_match_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["bench", "dlrm*", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["dlrm"]


def test_the_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["bench", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [task.name for task in list_tasks()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--rounds 2", "--rounds must be at least 5, and is 2"),
        ("--seconds -1", "--seconds must not be less than 0"),
        ("--tolerance 1.5", "--tolerance must be 0 or more"),
        ("--optimizer adamm", "'adamm'"),
        ("--dtype int8", "'int8'"),
        ("nothing", "no task is named nothing"),
        ("--json no/such/folder.json", "the folder of 'no/such/folder.json' does not exist"),
        ("--compare a b c", "one file or two"),
        ("--shapes 3x", "'3x' must be shapes of sides above 0"),
        ("--shapes 4,0", "'4,0' must be shapes of sides above 0"),
        ("--contender math", "'math' is not of the form MODULE:FUNCTION"),
        ("--contender no_module:f", "'no_module:f' cannot be imported: No module named"),
        ("--contender math:no_name", "'math:no_name' cannot be imported: module 'math' has"),
        ("--contender math:pi", "'math:pi' is no function, but float"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command_line.main(["bench", *arguments.split(), "--device", "cpu"])
    printed = capsys.readouterr()
    assert refused.value.code == 2
    assert words in printed.err
    assert printed.err.count("\n") == 1


OWN = """
import numpy as np

kept = []

def descend(weights, gradients):
    kept.append((weights, [weight.copy() for weight in weights], gradients))

    def step():
        kept[-1] = *kept[-1][:3], 1 + sum(kept[-1][3:])
        for weight, gradient in zip(weights, gradients):
            if hasattr(gradient, "indices"):
                np.subtract.at(weight, gradient.indices, gradient.values)
            else:
                weight -= gradient

    return step

def forget(weights, gradients):
    return None

def fail(weights, gradients):
    return 1 / 0

def fail_at_row(weights, gradients):
    if hasattr(gradients[0], "indices"):
        return lambda: {}["row"]
    return lambda: None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a user's own module of contenders, which lies in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    Path("my_contenders.py").write_text(OWN)
    yield lambda: sys.modules["my_contenders"]
    sys.modules.pop("my_contenders", None)


@pytest.mark.usefixtures("small_tasks")
def test_a_users_own_optimizer_is_timed_beside_the_others(
    own: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*FEW, "--contender", "my_contenders:descend", "--json", "a.json"]
    assert command_line.main(["bench", *arguments]) == 0
    assert capsys.readouterr().out.count("my_contenders:descend") >= 2
    runs = read_results(Path("a.json")).runs
    for run in runs.values():
        figures = run.contenders["my_contenders:descend"]
        assert len(figures.times["warm"].samples_ms) == 5
        assert (figures.state_bytes, figures.peak_extra_bytes is None) == (None, False)
    dense, sparse = own().kept
    for weights, at_first, gradients, num_steps in (dense, sparse):
        for weight, first, gradient in zip(weights, at_first, gradients, strict=True):
            move = np.zeros_like(first, np.float64)
            if hasattr(gradient, "indices"):
                np.add.at(move, gradient.indices, gradient.values)
            else:
                move += gradient
            np.testing.assert_allclose(weight, first - num_steps * move, rtol=1e-3, atol=0.1)


@pytest.mark.usefixtures("own", "small_tasks")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("forget", r" must return a function that makes a step, and returned NoneType"),
        ("fail", r" failed in .*my_contenders.py, line 23: ZeroDivisionError: division by zero"),
        ("fail_at_row", r" failed in .*my_contenders.py, line 27: KeyError: 'row'"),
    ],
)
def test_a_contender_that_fails_is_named_in_one_line_with_its_own_error(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*FEW, "--json", "a.json", "--contender", f"my_contenders:{name}"]
    assert command_line.main(["bench", *arguments]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"gpuopt bench: my_contenders:{name}{words}", printed[-1])
    if name == "fail_at_row":  # the first task has no rows
        assert list(read_results(Path("a.json")).runs) == ["small/adam/float32"]
        assert "1 of 2 runs are in a.json" in printed[0]
    else:
        assert len(printed) == 1


@pytest.mark.usefixtures("own")
def test_a_module_that_fails_is_refused_with_its_own_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("this_fails.py").write_text("raise ValueError('no data')")
    with pytest.raises(SystemExit):
        command_line.main(["bench", *FEW, "--contender", "this_fails:descend"])
    assert "'this_fails:descend' cannot be imported: ValueError: no data\n" in (
        capsys.readouterr().err
    )


@pytest.mark.usefixtures("small_tasks")
def test_a_users_own_shapes_are_a_task_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert command_line.main(["bench", *FEW, "--shapes", "40x30,7", "--json", str(file)]) == 0
    runs = read_results(file).runs
    # A weight is read and written, and so are Adam's two slots; a gradient is read.
    assert {name: run.bytes_moved for name, run in runs.items()} == {
        "40x30,7/adam/float32": 7 * 4 * (40 * 30 + 7)
    }
    command_line.main(["bench", *FEW, "small", "--shapes", "7", "--json", str(file)])
    assert set(read_results(file).runs) == {"7/adam/float32", "small/adam/float32"}


@pytest.mark.parametrize("text", ["", "[1]", '{"format": 0}', '{"format": 1, "runs": {"a": {}}}'])
def test_a_file_that_has_no_results_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"old\.json is no"):
        read_results(path)
    arguments: list[Any] = ["bench", "--compare", str(path), str(path)]
    assert command_line.main(arguments) == 2
    assert "gpuopt bench: " in capsys.readouterr().err


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("warm", "median_ms", 0),
        ("warm", "samples_ms", []),
        ("cold", "samples_ms", [1.0, -1.0]),
        ("cold", "samples_ms", [1.0, "2.0"]),
        ("cold", "p10_ms", float("nan")),
        ("cold_dirty", "samples_ms", [1.0, 0.0]),
        ("figures", "gb_per_s", "1"),
        ("figures", "waits", 1.5),
        ("run", "copy_ms", [0.0]),
        ("run", "left_out", ["torch"]),
        ("all", "machine", "mine"),
        ("all", "not_run", {"a task": 3}),
    ],
)
def test_a_file_with_impossible_figures_is_refused(
    where: str, key: str, value: object, tmp_path: Path
) -> None:
    times = asdict(summarize([1.0] * 30))
    figures: dict[str, Any] = {
        **{kind: dict(times) for kind in ("warm", "cold", "cold_dirty")},
        **{"gb_per_s": 1.0, "share_of_copy": 1.0, "state_bytes": 0},
    }
    run = asdict(Run("a task", 100, None, None, None, None, [1.0] * 30, 1.0, {}))
    run["contenders"]["gpuopt"] = figures
    results: dict[str, Any] = {
        **{"format": 1, "gpuopt": "1", "date": "a day", "device": "cpu", "machine": {"cpu": "a"}},
        **{"runs": {"small/adam/float32": run}, "not_run": {}},
    }
    path = tmp_path / "old.json"
    path.write_text(json.dumps(results))
    assert to_json(read_results(path)) == {**to_json(read_results(path)), **results}
    {"all": results, "run": run, "figures": figures, **figures}[where][key] = value
    path.write_text(json.dumps(results))
    with pytest.raises(ResultsError, match=rf"old\.json is no file of results: .*{key}"):
        read_results(path)


def test_the_tasks_run_under_pytest_benchmark_against_a_baseline(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "bench", "-k", "1000-tensors and numpy", "-rs"]
    command += ["-p", "no:cacheprovider", "--benchmark-storage", str(tmp_path)]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        # As a worker of pytest-xdist, pytest-benchmark would measure nothing.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return subprocess.run(
            [*command, *options], cwd=root, env=environment, capture_output=True, text=True
        )

    first = run("--benchmark-autosave")
    assert first.returncode == 0, first.stdout + first.stderr
    [baseline] = tmp_path.rglob("*.json")
    written = json.loads(baseline.read_text())
    [entry] = written["benchmarks"]
    assert entry["group"] == "1000-tensors"
    assert entry["stats"]["rounds"] == 30
    entry["stats"] = {
        key: value / 1000 if key == "median" else value for key, value in entry["stats"].items()
    }
    baseline.write_text(json.dumps(written))
    slower = run("--benchmark-compare", "--benchmark-compare-fail=median:900%")
    assert slower.returncode != 0
    assert "has regressed" in slower.stdout + slower.stderr
