"""Reports of steps: their bytes and launches, on each kind of device."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import backend_for, launch_observer
from gpuopt.backends.cpu import backend as cpu
from gpuopt.device import Device
from gpuopt.step import report as report_of_steps
from gpuopt.step.report import Report

pytestmark = pytest.mark.contract


def test_a_report_has_the_bytes_of_variables_and_groups() -> None:
    w, b = Variable(np.ones((8, 4), np.float32), name="w"), Variable([1.0, 2.0], name="b")
    optimizer = gpuopt.AdamOptimizer(groups=[ParameterGroup("^b", learning_rate=0.1)])
    pairs = [(np.ones((8, 4), np.float32), w), (np.ones(2, np.float32), b)]
    optimizer.apply_gradients(pairs)
    with optimizer.report() as report:
        for _ in range(3):
            optimizer.apply_gradients(pairs)
    optimizer.apply_gradients(pairs)
    # In each step, the gradient is read, and the variable, m and v are read and written.
    assert report.num_steps == 3
    assert report.variables == [("w", "", "cpu", 3 * 7 * 128), ("b", "^b", "cpu", 3 * 7 * 8)]
    assert report.groups == {"": 3 * 7 * 128, "^b": 3 * 7 * 8}


@pytest.mark.parametrize(
    ("arguments", "num_bytes"),
    [
        ({}, 14),
        ({"masters": "float32"}, 28),
        ({"masters": "remainder"}, 26),
        ({"masters": "remainder", "slot_dtype": "bfloat16"}, 18),
    ],
)
def test_a_report_has_the_bytes_that_the_guide_states_for_a_parameter(
    arguments: dict[str, Any], num_bytes: int
) -> None:
    w = Variable(np.ones((8, 4), ml_dtypes.bfloat16), name="w")
    optimizer = gpuopt.AdamOptimizer(**arguments)
    with optimizer.report() as report:
        optimizer.apply_gradients([(np.ones((8, 4), ml_dtypes.bfloat16), w)])
    assert report.variables == [("w", "", "cpu", 32 * num_bytes)]


def test_a_report_has_each_kind_of_launch_and_its_time() -> None:
    w = Variable(np.ones(2**16, np.float32), name="w")
    table = Variable(np.ones((10, 4), np.float32), name="table")
    rows = IndexedSlices(np.ones((2, 4), np.float32), np.array([3, 1]))
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    with optimizer.report() as report:
        for _ in range(4):
            optimizer.apply_gradients([(np.ones(2**16, np.float32), w), (rows, table)])
    counts = {(each.device, each.name): each.num_launches for each in report.launches}
    assert counts == {("cpu", "dense momentum"): 4, ("cpu", "sparse momentum"): 4}
    assert 0 < sum(each.total_ms for each in report.launches) <= report.host_ms
    # Two of ten rows of the table and its slot, besides the gradient and its numbers of rows.
    assert report.variables[1].num_bytes == 4 * (2 * 16 + 2 * 8 + 2 * 2 * 160 // 5)
    total = sum(each.total_ms for each in report.launches)
    num_bytes = sum(each.num_bytes for each in report.variables)
    assert report.bandwidth("cpu") == pytest.approx(num_bytes / total * 1e3)
    share = report.share_of_copy("cpu") * report.copy_rates["cpu"]
    assert share == pytest.approx(report.bandwidth("cpu"))


def test_all_rows_count_where_a_sparse_gradient_updates_all() -> None:
    table = Variable(np.ones((10, 4), np.float32), name="table")
    rows = IndexedSlices(np.ones((2, 4), np.float32), np.array([3, 1]))
    sizes = []
    for options in ({}, {"catch_up": True}):
        optimizer = gpuopt.AdamOptimizer(**options)
        with optimizer.report() as report:
            optimizer.apply_gradients([(rows, table)])
        sizes.append(report.variables[0].num_bytes)
    assert sizes == [48 + 2 * 3 * 160, 48 + 2 * 3 * 32]


@pytest.mark.parametrize(
    ("dtype", "arguments", "num_bytes"),
    [
        (np.float32, {}, 28 + 8),
        (ml_dtypes.bfloat16, {}, 14 + 8),
        (ml_dtypes.bfloat16, {"masters": "float32"}, 28 + 8),
    ],
)
def test_averages_count_where_the_rule_moves_them(
    dtype: Any, arguments: dict[str, Any], num_bytes: int
) -> None:
    w = Variable(np.ones((8, 4), dtype), name="w")
    averages = gpuopt.ExponentialMovingAverage(0.9)
    optimizer = gpuopt.AdamOptimizer(averages=averages, **arguments)
    with optimizer.report() as report:
        optimizer.apply_gradients([(np.ones((8, 4), dtype), w)])
    assert report.variables[0].num_bytes == 32 * num_bytes


def test_averages_that_move_after_the_update_count_with_what_they_read() -> None:
    table = Variable(np.ones((10, 4), np.float32), name="table")
    bound = Variable(np.ones(10, np.float32), name="bound", constraint=lambda value: value)
    rows = IndexedSlices(np.ones((2, 4), np.float32), np.array([3, 1]))
    averages = gpuopt.ExponentialMovingAverage(0.9)
    optimizer = gpuopt.LazyAdamOptimizer(averages=averages)
    with optimizer.report() as report:
        optimizer.apply_gradients([(rows, table), (np.ones(10, np.float32), bound)])
    # The average of the table moves in all rows.
    expected = {"table": 48 + 2 * 3 * 32 + 3 * 160, "bound": (1 + 2 * 3 + 3) * 40}
    assert {each.variable: each.num_bytes for each in report.variables} == expected


def test_a_report_is_text_and_tables() -> None:
    w = Variable(np.ones(100, np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(0.1)
    with optimizer.report() as report:
        optimizer.apply_gradients([(np.ones(100, np.float32), w)])
    text = str(report)
    assert text.startswith("1 steps, ")
    assert "dense gradient_descent" in text
    assert "MB a step" in text
    titles = [table.title for table in report.tables()]
    assert titles == ["Devices", "Launches of a step", "Variables"]


def test_steps_of_other_optimizers_are_not_in_a_report() -> None:
    w = Variable([1.0], name="w")
    mine, other = gpuopt.GradientDescentOptimizer(0.1), gpuopt.MomentumOptimizer(0.1, 0.9)
    with mine.report() as report:
        other.apply_gradients([([1.0], w)])
        assert launch_observer.this_thread.observer is None
        mine.apply_gradients([([1.0], w)])
        with pytest.raises(RuntimeError, match="is open already"), mine.report():
            pass
    assert [each.name for each in report.launches] == ["dense gradient_descent"]
    assert mine.open_report is None


def test_a_step_inside_of_a_reported_one_is_not_in_its_report() -> None:
    w, v = Variable([1.0], name="w"), Variable([1.0], name="v")
    inside = gpuopt.MomentumOptimizer(0.1, 0.9)
    outside = gpuopt.GradientDescentOptimizer(lambda: inside.apply_gradients([([1.0], v)]) or 0.1)
    with outside.report() as report:
        outside.apply_gradients([([1.0], w)])
    assert [each.name for each in report.launches] == ["dense gradient_descent"]
    assert v.numpy()[0] < 1


def test_a_wrapper_and_steps_in_parts_are_reported() -> None:
    w = Variable([1.0], name="w")
    optimizer = gpuopt.AdamOptimizer(0.1)
    wrapper = gpuopt.MultitaskOptimizerWrapper(optimizer)
    with wrapper.report() as report:
        wrapper.apply_gradients([([1.0], w)])
        optimizer.minimize(lambda: (w * w).sum(), gate_gradients=optimizer.GATE_NONE)
    assert report.num_steps == 2
    assert [each.num_launches for each in report.launches] == [2]
    assert [each.num_bytes for each in report.variables] == [2 * 7 * 4]


def test_a_step_that_fails_is_not_counted() -> None:
    w = Variable([1.0], name="w")

    class Fails(gpuopt.GradientDescentOptimizer):
        def _finish(self, update_ops: Any, name_scope: str) -> None:
            raise ArithmeticError

    optimizer = Fails(0.1)
    with optimizer.report() as report:
        with pytest.raises(ArithmeticError):
            optimizer.apply_gradients([([1.0], w)])
        assert launch_observer.this_thread.observer is None
    assert report.num_steps == 0


@pytest.mark.parametrize("num_looks", range(4))
def test_a_report_may_end_in_the_middle_of_another_threads_step(num_looks: int) -> None:
    looks: list[Any] = []

    class Watched(gpuopt.GradientDescentOptimizer):
        @property
        def open_report(self) -> Any:
            return looks.pop(0) if looks else None

        @open_report.setter
        def open_report(self, report: Any) -> None: ...

    w = Variable([1.0], name="w")
    optimizer = Watched(0.5)
    with optimizer.report() as report:
        looks += [report] * num_looks
        optimizer.apply_gradients([([1.0], w)])
    np.testing.assert_array_equal(w.numpy(), [0.5])


def test_a_report_has_nothing_of_a_step_in_whose_middle_it_is_opened() -> None:
    w = Variable([1.0], name="w")
    optimizer = gpuopt.GradientDescentOptimizer(lambda: opened.append(reports.__enter__()) or 0.5)
    opened: list[Any] = []
    reports = optimizer.report()
    optimizer.apply_gradients([([1.0], w)])
    reports.__exit__(None, None, None)
    [report] = opened
    assert (report.num_steps, report.launches, report.variables) == (0, [], [])


def test_steps_go_on_while_a_report_waits_for_a_gpu() -> None:
    report = Report(gpuopt.GradientDescentOptimizer(0.1))
    is_waiting, is_done = threading.Event(), threading.Event()

    def wait_for_the_gpu() -> float:
        is_waiting.set()
        assert is_done.wait(60)
        return 2.0

    report.note_launch("gpu:0", "dense_update adam", wait_for_the_gpu)
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: report.launches)
        assert is_waiting.wait(60)
        noting = pool.submit(report.note_launch, "gpu:0", "dense_update adam", lambda: 1.0)
        try:
            noting.result(timeout=60)
        finally:
            is_done.set()
        assert [each.num_launches for each in reading.result()] == [1]
    assert report.launches == [("gpu:0", "dense_update adam", 2, 3.0)]


def test_a_copy_is_larger_than_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    copyto = np.copyto
    monkeypatch.setattr(cpu, "read_cache_bytes", lambda: 65 * 2**20)
    monkeypatch.setattr(np, "copyto", lambda to, of: (sizes.append(of.nbytes), copyto(to, of)))
    assert backend_for(Device.cpu).measure_copy() > 0
    assert set(sizes) == {65 * 2**20}


@pytest.mark.emulator
def test_a_gpus_launches_have_its_kernels_names_for_profilers_too(emulated_gpus: Any) -> None:
    launcher = emulated_gpus[1]
    w = Variable(np.ones(64, np.float32), name="w", device="gpu:1")
    optimizer = gpuopt.AdamOptimizer(0.1)
    with launcher.device():
        gradient = launcher.xp.ones((64,), np.float32)
    with optimizer.report() as report:
        for _ in range(2):
            optimizer.apply_gradients([(gradient, w)])
    launches = {(each.device, each.name): each.num_launches for each in report.launches}
    assert launches == {("gpu:1", "dense_update adam"): 2}
    assert launcher.ranges == ["dense_update adam"] * 2
    assert report.copy_rates["gpu:1"] > 0
    assert report.variables == [("w", "", "gpu:1", 2 * 7 * 256)]


@pytest.mark.emulator
@pytest.mark.parametrize(
    "arguments", [{"clip_norm": 1.0}, {"on_nonfinite": "skip"}], ids=["clip_norm", "on_nonfinite"]
)
def test_launches_that_read_gradients_before_the_update_are_reported(
    arguments: dict[str, Any], emulated_gpus: Any
) -> None:
    launcher = emulated_gpus[1]
    w = Variable(np.ones(64, np.float32), name="w", device="gpu:1")
    optimizer = gpuopt.AdamOptimizer(0.1, **arguments)
    with launcher.device():
        gradient = launcher.xp.ones((64,), np.float32)
    optimizer.apply_gradients([(gradient, w)])  # the host decides about a first step
    with optimizer.report() as report:
        for _ in range(2):
            optimizer.apply_gradients([(gradient, w)])
    launches = [each.num_launches for each in report.launches]
    assert launches == [2, 2]


@pytest.mark.gpu
def test_a_report_times_launches_by_the_gpus_clock() -> None:
    cupy = pytest.importorskip("cupy")
    w = Variable(np.ones(1000, np.float32), name="w", device="gpu:0")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    with optimizer.report() as report:
        for _ in range(3):
            optimizer.apply_gradients([(cupy.ones(1000, np.float32), w)])
    [launch] = report.launches
    assert launch[:3] == ("gpu:0", "dense_update momentum", 3)
    assert launch.total_ms >= 0
    assert w.numpy()[0] == pytest.approx(1 - 0.1 * (1 + 1.9 + 2.71))


@pytest.mark.gpu
def test_a_report_counts_the_waits_of_steps_and_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(report_of_steps, "_MOST_UNREAD", 1)
    w = Variable(np.ones(1000, np.float32), name="w", device="gpu:0")

    def read_and_choose() -> float:
        return 0.1 if w.numpy().any() else 0.2

    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"learning_rate": read_and_choose}, 4),
        ({"on_nonfinite": "skip"}, 0),
        ({"on_nonfinite": "raise"}, 0),
        ({"on_nonfinite": "skip", "learning_rate": lambda: 0.1}, 4),
        ({"on_nonfinite": "raise", "learning_rate": lambda: 0.1}, 4),
    ]
    for options, waits in cases:
        optimizer = gpuopt.AdamOptimizer(**options)
        gradient = cupy.ones(1000, np.float32)
        optimizer.apply_gradients([(gradient, w)])
        with optimizer.report() as report:
            for _ in range(4):
                # A host that is two steps ahead of a GPU would wait for it.
                cupy.cuda.get_current_stream().synchronize()
                optimizer.apply_gradients([(gradient, w)])
        assert report.num_waits == waits
        assert f"in which it waits {waits // 4} times for a GPU" in str(report)


def test_a_reports_repr_is_a_line() -> None:
    optimizer = gpuopt.GradientDescentOptimizer(0.1, name="Descent")
    variable = Variable(np.zeros(250_000, np.float32))
    with optimizer.report() as report:
        for _ in range(2):
            optimizer.apply_gradients([(np.ones(250_000, np.float32), variable)])
    shown = r'<Report of "Descent": 2 steps, \d+\.\d{3} ms each on the host, 3\.000 MB each>'
    assert re.fullmatch(shown, repr(report))


def test_a_closed_report_enters_no_function_in_later_steps() -> None:
    def step_of(optimizer: gpuopt.Optimizer) -> Callable[[], None]:
        pairs = [(np.full(64, 1e-3, np.float32), Variable(np.ones(64, np.float32)))]
        return lambda: optimizer.apply_gradients(pairs)

    with_one, without = (gpuopt.MomentumOptimizer(0.01, 0.9) for _ in range(2))
    after, never = step_of(with_one), step_of(without)
    with with_one.report():
        after()
    never()
    calls = count_calls(never)
    assert calls > 10
    assert count_calls(after) == calls


def count_calls(step: Callable[[], None]) -> int:
    """Counts the functions that are entered."""
    calls = 0

    def enter(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(enter)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls
