"""Rows catch up beside signal handlers, Ctrl-C and other threads, which may come at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from interrupt_at import HandleAt, Interrupt, InterruptAt
from late_pairs import HEIGHT, SLICES, Pair, close

import gpuopt
from gpuopt import backends, locks
from gpuopt.backends.cpu import catch_up as cpu_catch_up
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.rules.catch_up import Factors
from gpuopt.step import sparse_updates
from gpuopt.variables.gate import between_writes

# Where a signal handler may come.
_INSIDE = (
    "catch_up.py",
    "missed_steps.py",
    "rows_behind.py",
    "sparse_update.py",
    "tables_behind.py",
)


def test_a_read_that_is_interrupted_is_finished_by_the_next() -> None:
    moment, finished = 1, False
    while not finished:
        pair = Pair()
        pair.step(12)
        try:
            with InterruptAt(moment, inside=(*_INSIDE, "gate.py")):
                pair.late.numpy()
            finished = True
        except Interrupt:
            pair.late.numpy()
        pair.check()
        moment += 3
    assert moment > 60


def test_a_step_that_is_interrupted_leaves_other_rows_to_catch_up() -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    moment, finished = 1, False
    while not finished:
        pair = Pair()
        pair.step(12)
        pair.apply(SLICES(np.ones((len(others), 3), "f4"), others))
        pair.step(3)
        try:
            with InterruptAt(moment, inside=_INSIDE):
                pair.optimizer.apply_gradients([(SLICES(np.ones((1, 3), "f4"), [0]), pair.late)])
            finished = True
        except Interrupt:
            pass
        # Counted, or not: there is nothing between.
        before = pair.exact.numpy()
        pair.all_rows.apply_gradients([(SLICES(np.ones((1, 3), "f4"), [0]), pair.exact)])
        got, after = pair.late.numpy()[others], pair.exact.numpy()
        is_counted = abs(got - after[others]).max() < abs(got - before[others]).max()
        close(got, (after if is_counted else before)[others])
        moment += 3
    assert is_counted
    assert moment > 60


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize(
    ("call", "handler"), [("read", "read"), ("read", "step"), ("step", "read"), ("step", "look up")]
)
def test_a_signal_handler_may_come_at_any_moment(call: str, handler: str) -> None:
    others = np.arange(HEIGHT // 4, HEIGHT)
    slices = SLICES(np.full((2, 3), 2, np.float32), [1, 19])
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "read": lambda optimizer, table: table.numpy(),
        "look up": lambda optimizer, table: gpuopt.embedding_lookup(table, [0, 17]),
        "step": lambda optimizer, table: optimizer.apply_gradients([(slices, table)]),
    }
    moment, is_over = 1, False
    while not is_over:
        pair = Pair()
        pair.step(3)
        pair.apply(SLICES(np.ones((len(others), 3), "f4"), others))
        pair.step(2)
        handle = HandleAt(moment, partial(calls[handler], pair.optimizer, pair.late), _INSIDE)
        with handle:
            calls[call](pair.optimizer, pair.late)
        is_over = handle.is_over
        for each in (call, *[handler] * (not is_over)):
            calls[each](pair.all_rows, pair.exact)
        pair.late.numpy()
        pair.check()
        moment += 3
    assert moment > 20


@pytest.fixture
def helping_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has a thread help with numpy's arithmetic, four rows at a time."""
    monkeypatch.setenv("GPUOPT_COMPILED", "0")
    monkeypatch.setenv("GPUOPT_THREADS", "2")
    monkeypatch.setattr(cpu_catch_up, "CHUNK_ELEMENTS", 12)
    limits = CpuLimits(small_elements=1, large_elements=0, elements_per_thread=1)
    with backends.using(Device.cpu, CpuBackend(limits)):
        yield


@pytest.mark.usefixtures("helping_threads")
@pytest.mark.parametrize(
    ("call", "handler"), [("read", "read"), ("read", "step"), ("step", "read")]
)
def test_a_signal_handler_waits_for_rows_that_helping_threads_are_moving(
    call: str, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code moves a row before it notes that it is up to date: so these threads do."""
    pair = Pair()
    others = np.arange(HEIGHT // 4, HEIGHT)
    pair.apply(SLICES(np.ones((len(others), 3), "f4"), others))
    pair.step(3)
    slices = SLICES(np.ones((len(others), 3), "f4"), others)
    before = pair.exact.numpy().copy()
    moving = threading.Event()
    handled: list[bool] = []
    bring_up_some = cpu_catch_up._bring_up_some

    def bring_up_slowly(written: Any, count: Any, some: Any, *step: Any) -> bool:
        if threading.current_thread() is not threading.main_thread():
            now, last = count.now, count.last[some]
            is_done = bring_up_some(written, count, some, *step)
            count.last[some] = last
            moving.set()
            time.sleep(0.1)
            count.last[some] = now
            return is_done
        if not handled:
            handled.append(True)
            assert moving.wait(5)
            if handler == "step":
                pair.optimizer.apply_gradients([(slices, pair.late)])
            else:  # rows that step are where they were, or a step further
                steady = slice(None) if call == "read" else slice(HEIGHT // 4)
                close(pair.late.numpy()[steady], before[steady])
        return bring_up_some(written, count, some, *step)

    monkeypatch.setattr(cpu_catch_up, "_bring_up_some", bring_up_slowly)
    if call == "read":
        pair.late.numpy()
    else:
        pair.optimizer.apply_gradients([(slices, pair.late)])
    assert handled
    if "step" in (call, handler):
        pair.all_rows.apply_gradients([(slices, pair.exact)])
    pair.late.numpy()
    pair.check()


def test_threads_may_read_while_another_steps() -> None:
    pair = Pair(height=400)
    pair.step()
    ends = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while not ends.is_set():
                pair.late.numpy()
                gpuopt.embedding_lookup(pair.late, np.arange(50))
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    pair.step(150)
    ends.set()
    for reader in readers:
        reader.join()
    assert not errors
    pair.late.numpy()
    pair.check()


def test_a_slot_is_replaced_while_another_thread_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 5.0)
    pair = Pair()
    pair.step(10)
    slots = pair.optimizer.state.table("m")
    errors: list[BaseException] = []

    def replace() -> None:
        try:
            slots[pair.late.identity] = gpuopt.Variable(np.ones((HEIGHT, 3), "f4"))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=replace)
    with between_writes("saving"):
        thread.start()
        time.sleep(0.1)
        with pair.optimizer.state.lock:  # as a save takes it
            pass
    thread.join()
    assert not errors
    close(pair.late._array, pair.exact)


def test_two_threads_may_step_by_optimizers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, exact = Pair(), gpuopt.AdamOptimizer(0.01)
    late = gpuopt.AdamOptimizer(0.01, catch_up=True)
    slices = SLICES(np.ones((1, 3), "f4"), [30])
    late.apply_gradients([(slices, pair.late)])
    exact.apply_gradients([(slices, pair.exact)])
    pair.step(10)
    table_of = sparse_updates.table_behind

    def replaced_by_another_thread(*arguments: Any) -> Any:
        monkeypatch.undo()
        table = table_of(*arguments)
        step = partial(late.apply_gradients, [(slices, pair.late)])
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return table

    monkeypatch.setattr(sparse_updates, "table_behind", replaced_by_another_thread)
    pair.apply(SLICES(np.ones((1, 3), "f4"), [20]))
    # Made anew, under the lock of the table that the other thread's step came by.
    behind: Any = pair.late.identity.behind
    assert behind.belongs_to(pair.optimizer.state)
    exact.apply_gradients([(slices, pair.exact)])
    pair.late.numpy()
    pair.check()


def test_a_signal_handler_may_step_by_another_optimizer() -> None:
    value = np.full((2, 3), 2, np.float32)
    slices, others = SLICES(value, [1, 19]), SLICES(value, [2, 18])
    moment, is_over = 1, False
    while not is_over:
        pair = Pair(learning_rate=0.1)
        late, exact = gpuopt.AdamOptimizer(catch_up=True), gpuopt.AdamOptimizer()
        pair.step(4)
        handle = HandleAt(moment, partial(late.apply_gradients, [(others, pair.late)]), _INSIDE)
        with handle:
            pair.optimizer.apply_gradients([(slices, pair.late)])
        is_over = handle.is_over
        pair.all_rows.apply_gradients([(slices, pair.exact)])
        if not is_over:
            exact.apply_gradients([(others, pair.exact)])
        # Of rows that the step in whose middle the handler comes does not name.
        close(*(np.delete(table.numpy(), [1, 19], axis=0) for table in (pair.late, pair.exact)))
        moment += 3
    assert moment > 20


@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_signal_handler_may_take_the_last_room(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Factors, "room_for", lambda self, height: 6)
    value = np.full((2, 3), 2, np.float32)
    slices, others = SLICES(value, [1, 19]), SLICES(value, [2, 18])
    moment, is_over = 1, False
    while not is_over:
        pair = Pair()
        pair.step(steps)
        handle = HandleAt(
            moment, partial(pair.optimizer.apply_gradients, [(others, pair.late)]), _INSIDE
        )
        with handle:
            pair.optimizer.apply_gradients([(slices, pair.late)])
        is_over = handle.is_over
        for each in [slices] if is_over else [slices, others]:
            pair.all_rows.apply_gradients([(each, pair.exact)])
        # Of rows that neither names: the order of the steps is the handler's. One step that is lost
        # makes ten times the difference that their numbers make.
        got, expected = (
            np.delete(table.numpy(), [1, 2, 18, 19], axis=0) for table in (pair.late, pair.exact)
        )
        np.testing.assert_allclose(got, expected, atol=5e-5)
        moment += 3
    assert moment > 20


class _Handled:
    """Calls in whose middle a signal handler steps by rows 2 and 18, at one moment after another.

    The steps of rows that no gradient names are few, and large: one that is lost moves them by ten
    times what the order of two steps does.
    """

    OTHERS = SLICES(np.full((2, 3), 1, np.float32), [2, 18])

    def __init__(self) -> None:
        self.pair = Pair(learning_rate=0.1)
        self.pair.apply(SLICES(np.full((20, 3), 3, np.float32), np.arange(20, HEIGHT)))

    def step(self, number: int) -> None:
        for _ in range(number):
            self.pair.apply(SLICES(np.ones((2, 3), np.float32), [3, 4]))

    def call_at(self, moment: int, call: Callable[[], Any]) -> bool:
        """Returns whether the call was over before that moment."""
        pair = self.pair
        step = partial(pair.optimizer.apply_gradients, [(self.OTHERS, pair.late)])
        handle = HandleAt(moment, step, _INSIDE)
        with handle:
            call()
        if not handle.is_over:
            pair.all_rows.apply_gradients([(self.OTHERS, pair.exact)])
        return handle.is_over

    def check(self) -> None:
        tables = self.pair.late, self.pair.exact
        got, expected = (table.numpy()[20:] for table in tables)
        np.testing.assert_allclose(got, expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("call", ["read", "step"])
def test_steps_after_a_signal_handler_took_the_last_room_are_not_lost(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Factors, "room_for", lambda self, height: 6)
    slices = SLICES(np.ones((2, 3), np.float32), [1, 19])
    moment, is_over = 1, False
    while not is_over:
        handled = _Handled()
        pair = handled.pair
        handled.step(5)
        calls: dict[str, Callable[[], Any]] = {
            "read": pair.late.numpy,
            "step": partial(pair.optimizer.apply_gradients, [(slices, pair.late)]),
        }
        is_over = handled.call_at(moment, calls[call])
        if call == "step":
            pair.all_rows.apply_gradients([(slices, pair.exact)])
        handled.step(9)
        handled.check()
        moment += 3
    assert moment > 20


def test_a_signal_handler_may_step_while_a_new_count_begins() -> None:
    slices = SLICES(np.ones((2, 3), np.float32), [1, 19])
    moment, is_over = 1, False
    while not is_over:
        handled = _Handled()
        pair = handled.pair
        handled.step(3)
        for optimizer in (pair.optimizer, pair.all_rows):
            optimizer.hyperparameters["epsilon"] = 1e-3
        step = partial(pair.optimizer.apply_gradients, [(slices, pair.late)])
        is_over = handled.call_at(moment, step)
        pair.all_rows.apply_gradients([(slices, pair.exact)])
        handled.check()
        moment += 3
    assert moment > 20


def test_a_signal_handler_may_step_by_a_table_that_is_being_replaced() -> None:
    slices = SLICES(np.ones((2, 3), np.float32), [1, 19])
    moment, is_over = 1, False
    while not is_over:
        handled = _Handled()
        handled.step(3)
        other = gpuopt.AdamOptimizer(catch_up=True)
        step = partial(other.apply_gradients, [(slices, handled.pair.late)])
        is_over = handled.call_at(moment, step)
        handled.check()
        moment += 2
    assert moment > 20


@pytest.mark.parametrize("meanwhile", ["both tables", "another optimizer"])
@pytest.mark.parametrize("own", [0, 1])
def test_a_signal_handler_waits_for_no_thread_that_waits_for_the_step_around_it(
    own: int, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps by one table, a step of the other around it; a thread wants that one, or both."""
    monkeypatch.setattr(locks, "DEADLINE_S", 2.0)
    tables = [gpuopt.Variable(np.ones((HEIGHT, 3), "f4")) for _ in "12"]
    optimizer, others = (gpuopt.AdamOptimizer(catch_up=True) for _ in "12")
    slices = SLICES(np.ones((1, 3), "f4"), [1])
    optimizer.apply_gradients([(slices, table) for table in tables])
    for table in tables:
        table.numpy()  # then nobody has to bring it up to date first
    wanted = tables if meanwhile == "both tables" else [tables[own]]
    by = optimizer if meanwhile == "both tables" else others
    errors: list[BaseException] = []

    def step() -> None:
        try:
            by.apply_gradients([(slices, table) for table in wanted])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step)

    def handle() -> None:
        thread.start()
        time.sleep(0.2)
        gpuopt.AdamOptimizer(catch_up=True).apply_gradients([(slices, tables[1 - own])])

    with HandleAt(1, handle, ["sparse_update.py"]) as handled:
        optimizer.apply_gradients([(slices, tables[own])])
    thread.join()
    assert not handled.is_over
    assert not errors
