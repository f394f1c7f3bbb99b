"""Rows catch up beside signal handlers, Ctrl-C and other threads, which may come at any moment."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from interrupt_at import HandleAt, Interrupt, InterruptAt, each_moment
from late_pairs import HEIGHT, Pair, close
from other_thread import InThread, in_threads, repeated

import gpuopt
from gpuopt import IndexedSlices, locks
from gpuopt.backends.cuda.row_flags import CudaRowFlags
from gpuopt.step import sparse_updates
from gpuopt.variables import unfinished
from gpuopt.variables.gate import between_writes

pytestmark = pytest.mark.internal

FULL = bool(os.environ.get("GPUOPT_FULL"))
# Where a signal handler may come.
_INSIDE = (
    "catch_up.py",
    "rows_behind.py",
    "sparse_update.py",
    "tables_behind.py",
)
_INSIDE_A_READ = {
    "cpu": (*_INSIDE, "gate.py", "threads.py", "locks.py"),
    "gpu:0": ("cuda/backend", "cuda/catch_up", "cuda/order", "cuda/workspace", "rows_behind"),
}
_INSIDE_A_STEP = {
    "cpu": _INSIDE,
    "gpu:0": ("cuda/backend", "cuda/catch_up", "cuda/sparse", "gpuopt/step"),
}
ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EMULATED = pytest.param("emulated", marks=pytest.mark.emulator)


_READS: dict[str, Callable[[Pair], object]] = {
    "table": lambda pair: pair.late.numpy(),
    "slot": lambda pair: pair.slot("v"),
    "rows": lambda pair: gpuopt.embedding_lookup(pair.late, [17, 0, 17, 39]),
    "copy": lambda pair: copy.deepcopy(pair.late),
    "state": lambda pair: pair.optimizer.state_dict({"late": pair.late}),
}


@pytest.mark.parametrize(
    "every_place",
    ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx), ON_GPU],
    indirect=True,
)
@pytest.mark.parametrize("read", _READS)
@pytest.mark.one_in(3)
def test_a_read_that_is_cut_at_any_moment_is_finished_by_the_next(
    read: str, every_place: str
) -> None:
    whole = behind(every_place)
    expected = numbers(whole)
    whole.check()
    del whole
    stride, least = (1 if FULL else 5, 60) if every_place == "cpu" else (2, 20)
    for interrupt in each_moment(_INSIDE_A_READ[every_place], least=least, stride=stride):
        pair = behind(every_place)
        with suppress(Interrupt), interrupt:
            _READS[read](pair)
        assert not unfinished.unfinished_steps(), interrupt.moment
        _READS[read](pair)
        for got, exact in zip(numbers(pair), expected, strict=True):
            np.testing.assert_array_equal(got, exact, err_msg=str(interrupt.moment))


def behind(device: str) -> Pair:
    """Returns a table whose rows have missed different numbers of steps, some of them none."""
    pair = Pair(device=device)
    pair.apply(IndexedSlices(np.ones((HEIGHT, 3), "f4"), np.arange(HEIGHT)))
    pair.step(12)
    return pair


def numbers(pair: Pair) -> list[np.ndarray]:
    slots = [pair.optimizer.get_slot(pair.late, name) for name in ("m", "v")]
    return [each.numpy() for each in (pair.late, *slots)]


@pytest.mark.parametrize("device", ["host", ON_GPU], indirect=True)
def test_a_step_that_is_interrupted_leaves_other_rows_to_catch_up(device: str) -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    moment, finished = 1, False
    while not finished:
        pair = Pair(device=device)
        pair.step(12)
        pair.apply(IndexedSlices(np.ones((len(others), 3), "f4"), others))
        pair.step(3)
        try:
            with InterruptAt(moment, inside=_INSIDE_A_STEP[device]):
                pair.optimizer.apply_gradients(
                    [(IndexedSlices(np.ones((1, 3), "f4"), [0]), pair.late)]
                )
            finished = True
        except Interrupt:
            pass
        # Counted, or not: there is nothing between.
        before = pair.exact.numpy()
        pair.all_rows.apply_gradients([(IndexedSlices(np.ones((1, 3), "f4"), [0]), pair.exact)])
        got, after = pair.late.numpy()[others], pair.exact.numpy()
        is_counted = abs(got - after[others]).max() < abs(got - before[others]).max()
        close(got, (after if is_counted else before)[others])
        moment += 3 if device == "cpu" else 4
    assert is_counted
    assert moment > 60


def attempt(call: Callable[[], Any], made: list[bool]) -> None:
    made.append(False)
    with suppress(RuntimeError):
        call()
        made[-1] = True


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize(
    ("call", "handler"), [("read", "read"), ("read", "step"), ("step", "read"), ("step", "look up")]
)
def test_a_signal_handlers_call_is_made_or_refused_at_any_moment(call: str, handler: str) -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    slices = IndexedSlices(np.full((2, 3), 2, np.float32), [1, 19])
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "read": lambda optimizer, table: table.numpy(),
        "look up": lambda optimizer, table: gpuopt.embedding_lookup(table, [0, 17]),
        "step": lambda optimizer, table: optimizer.apply_gradients([(slices, table)]),
    }
    moment, is_over, num_refused = 1, False, 0
    while not is_over:
        pair = Pair()
        pair.step(3)
        pair.apply(IndexedSlices(np.ones((len(others), 3), "f4"), others))
        pair.step(2)
        made: list[bool] = []
        handle = partial(attempt, partial(calls[handler], pair.optimizer, pair.late), made)
        with HandleAt(moment, handle, _INSIDE):
            calls[call](pair.optimizer, pair.late)
        is_over = not made
        for each in (call, *[handler] * sum(made)):
            calls[each](pair.all_rows, pair.exact)
        num_refused += made == [False]
        pair.check()
        moment += 3 if FULL else 7
    assert num_refused > (5 if FULL else 2)


def test_threads_may_read_while_another_steps() -> None:
    pair = Pair(height=400)
    pair.step()

    def read() -> None:
        pair.late.numpy()
        gpuopt.embedding_lookup(pair.late, np.arange(50))

    with repeated(read, threads=2):
        pair.step(150)
    pair.check()


def test_a_slot_is_replaced_while_another_thread_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 5.0)
    pair = Pair()
    pair.step(10)
    slots = pair.optimizer.state.table("m")

    def replace() -> None:
        slots[pair.late.identity] = gpuopt.Variable(np.ones((HEIGHT, 3), "f4"))

    with between_writes("saving"):
        thread = InThread(replace)
        time.sleep(0.1)
        with pair.optimizer.state.lock:  # as a save takes it
            pass
    thread.join()
    close(pair.late._array, pair.exact)


def test_two_threads_may_step_by_optimizers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, exact = Pair(), gpuopt.AdamOptimizer(0.01)
    late = gpuopt.AdamOptimizer(0.01, catch_up=True)
    slices = IndexedSlices(np.ones((1, 3), "f4"), [30])
    late.apply_gradients([(slices, pair.late)])
    exact.apply_gradients([(slices, pair.exact)])
    pair.step(10)
    table_of = sparse_updates.table_behind

    def replaced_by_another_thread(*arguments: Any) -> Any:
        monkeypatch.undo()
        table = table_of(*arguments)
        in_threads(partial(late.apply_gradients, [(slices, pair.late)]))
        return table

    monkeypatch.setattr(sparse_updates, "table_behind", replaced_by_another_thread)
    pair.apply(IndexedSlices(np.ones((1, 3), "f4"), [20]))
    # Made anew, under the lock of the table that the other thread's step came by.
    behind: Any = pair.late.identity.behind
    assert behind.belongs_to(pair.optimizer.state)
    exact.apply_gradients([(slices, pair.exact)])
    pair.check()


@pytest.mark.parametrize("device", [EMULATED, ON_GPU], indirect=True)
@pytest.mark.parametrize("call", ["step", "read"])
def test_a_signal_handler_in_an_update_reads_beside_a_thread_that_waits_for_the_update(
    call: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 2.0)
    # A step would wait for this update before it has the table.
    monkeypatch.setattr(CudaRowFlags, "check", lambda self, flag, checks: None)
    pair = Pair(device=device)
    pair.step(14)
    assert pair.is_behind()
    other = gpuopt.Variable(np.ones(3, np.float32), device="gpu:0")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    calls: dict[str, Callable[[], Any]] = {"step": pair.step, "read": pair.late.numpy}
    threads: list[InThread] = []

    def handle() -> None:
        threads.append(InThread(calls[call]))
        time.sleep(0.2)
        pair.late.numpy()

    with HandleAt(1, handle, ["dense_launch.py"]) as handled:
        optimizer.apply_gradients([(np.ones(3, np.float32), other)])
    threads[0].join()
    assert not handled.is_over
    pair.check()
