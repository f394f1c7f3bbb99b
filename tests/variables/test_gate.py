"""Whoever saves or restores waits for writes in progress, and holds the next ones back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupt_at import Interrupt, InterruptAt, each_moment
from other_thread import InThread, held, repeated

import gpuopt
from gpuopt import DeadlineExceededError, ExponentialMovingAverage, Variable, locks
from gpuopt.distributed import MirroredStrategy
from gpuopt.step.rule_updates import RuleUpdates
from gpuopt.variables import gate
from gpuopt.variables.gate import between_writes, writing


def apply_step(w: Variable) -> None:
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.full(4, -1, np.float32), w)])


def in_place(w: Variable) -> None:
    w += 1


def item(w: Variable) -> None:
    w[:] = 1


def average(w: Variable) -> None:
    averages = ExponentialMovingAverage(0.5)
    averages.apply([lambda: np.ones(4, np.float32)])


def minimize_streaming(w: Variable) -> None:
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    optimizer.minimize(lambda: -np.sum(w * 1), var_list=[w], gate_gradients=optimizer.GATE_NONE)


WRITES: dict[str, Callable[[Variable], Any]] = {
    "a step": apply_step,
    "a streaming step": minimize_streaming,
    "assign": lambda w: w.assign(np.ones(4)),
    "assign, locked": lambda w: w.assign(np.ones(4), use_locking=True),
    "assign_add": lambda w: w.assign_add(np.ones(4)),
    "assign_sub": lambda w: w.assign_sub(-np.ones(4)),
    "in place": in_place,
    "item": item,
    "out=": lambda w: np.add(w, 1, out=w),
    "out= of a function": lambda w: np.clip(w, 1, 2, out=w),
    "at": lambda w: np.add.at(w, [0, 1], 1),
    "copyto": lambda w: np.copyto(w, 1),
    "put": lambda w: np.put(w, [0], 1),
    "averages": average,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_waits_until_whoever_saves_is_done(write: Callable[[Variable], Any]) -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    write(w)  # whatever is made at the first time
    w.assign(np.zeros(4))
    with between_writes("testing"):
        thread = InThread(lambda: write(w))
        assert not thread.ends_within(0.05)
        assert not w.numpy().any()
    thread.join()


@pytest.mark.parametrize("name", ["a step", "a streaming step", "assign", "copyto", "averages"])
def test_whoever_restores_may_write_and_a_save_holds_one_moment(name: str) -> None:
    """A signal handler may come in the middle of either, but makes no step there."""
    write = WRITES[name]
    w = Variable(np.zeros(4, np.float32), name="w")
    is_step = write in (apply_step, minimize_streaming)
    in_restore = pytest.raises(RuntimeError, match="restoring m") if is_step else nullcontext()
    with between_writes("restoring m", writes=True):
        with in_restore:
            write(w)
        with pytest.raises(
            RuntimeError, match="changed nor saved while this thread is restoring m"
        ):
            between_writes("saving")
    w.assign(np.zeros(4))
    with between_writes("saving m"), between_writes("saving again"):
        with pytest.raises(RuntimeError, match="changed nor saved while this thread is saving m"):
            write(w)
        with pytest.raises(RuntimeError, match="changed nor saved while this thread is saving m"):
            between_writes("restoring", writes=True)
        assert not w.numpy().any()
    write(w)


def test_an_exit_stack_may_hold_back_and_write() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    with ExitStack() as stack:
        stack.enter_context(between_writes("testing", writes=True))
        stack.enter_context(writing())
        thread = InThread(lambda: w.assign(np.ones(4)))
        assert not thread.ends_within(0.05)
    thread.join()


def test_copies_of_a_mirrored_variable_are_written_together() -> None:
    mirrored = MirroredStrategy(["cpu", "cpu"]).variable(np.zeros(4, np.float32), name="w")
    with between_writes("testing"):
        thread = InThread(lambda: mirrored.assign(np.ones(4)))
        assert not thread.ends_within(0.05)
        assert not any(copy.numpy().any() for copy in mirrored.replicas)
    thread.join()
    assert all(copy.numpy().all() for copy in mirrored.replicas)


def test_whoever_saves_waits_for_every_write_in_progress() -> None:
    order = []

    def save() -> None:
        with between_writes("testing"):
            order.append("save")

    with held(writing):
        thread = InThread(save)
        assert not thread.ends_within(0.05)
        order.append("write")
    thread.join()
    assert order == ["write", "save"]


def test_writes_of_threads_do_not_wait_for_each_other() -> None:
    with held(writing), writing(), writing():
        InThread(lambda: Variable(1.0).assign(2.0)).join()


def test_who_saves_in_the_middle_of_a_write_is_told_so_at_once() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    saver = gpuopt.Saver([w])
    with writing():
        for call in (
            lambda: saver.save("nowhere"),
            lambda: saver.save_async("nowhere"),
            lambda: saver.restore("nowhere"),
            gpuopt.AdamOptimizer().state_dict,
        ):
            with pytest.raises(RuntimeError, match="in the middle of a step"):
                call()
    gpuopt.AdamOptimizer().state_dict()


def test_threads_that_save_without_a_pause_let_others_write() -> None:
    def save() -> None:
        with between_writes("testing"):
            time.sleep(0.001)

    w = Variable(0.0, name="w")
    began = time.monotonic()
    with repeated(save, threads=2):
        while w.numpy() < 50 and time.monotonic() - began < 10:
            w.assign_add(1.0)
    assert w.numpy() == 50


def test_threads_that_write_without_a_pause_let_others_save() -> None:
    w = Variable(0.0, name="w")
    with repeated(lambda: w.assign_add(1.0), threads=3):
        for _ in range(20):
            with between_writes("testing"):
                before = w.numpy()
                time.sleep(0.001)
                assert w.numpy() == before


def test_a_hook_that_makes_and_writes_variables_does_not_lock_out_who_saves() -> None:
    class Counting(gpuopt.GradientDescentOptimizer):
        def _create_slots(self, var_list: Any) -> None:
            for variable in var_list:
                self._zeros_slot(variable, "count", "Count").assign_add(np.ones(4))

        def _apply_dense(self, grad: Any, var: Any) -> None:  # so that nothing is known beforehand
            super()._apply_dense(grad, var)

    w = Variable(np.zeros(4, np.float32), name="w")
    optimizer = Counting(1.0)
    with repeated(lambda: optimizer.apply_gradients([(np.ones(4, np.float32), w)])):
        for _ in range(200):
            state = optimizer.state_dict({"w": w})
            assert len({*state["slots"].get("count", {}).get("w", np.zeros(4))}) == 1


def test_another_threads_restore_comes_before_a_step_reads_its_scalars_or_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, step = Variable(np.zeros(4, np.float32), name="w"), Variable(0, name="step", dtype=np.int64)
    optimizer = gpuopt.AdamOptimizer(0.1)
    saver = gpuopt.Saver({"w": w, "step": step}, optimizers=[optimizer])

    def train() -> None:
        optimizer.apply_gradients([(np.ones(4, np.float32), w)], step)

    train()
    path, start = saver.save(tmp_path / "model"), optimizer.state_dict({"w": w})
    for _ in range(4):
        train()
    fix_scalars, threads = RuleUpdates.fix_scalars, []

    def fix_scalars_and_restore(updates: RuleUpdates) -> None:
        fix_scalars(updates)
        threads.append(InThread(lambda: saver.restore(path)))
        while not threads[0].ends_within(0.001) and not gate.last_closing.lock.locked():
            pass

    monkeypatch.setattr(RuleUpdates, "fix_scalars", fix_scalars_and_restore)
    train()
    threads[0].join()
    assert int(step) == 1
    assert str(optimizer.state_dict({"w": w})) == str(start)
    np.testing.assert_allclose(w.numpy(), -0.1, rtol=1e-5)


# Deadlines.


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 0.1)


@pytest.mark.usefixtures("short_deadline")
def test_every_wait_has_a_deadline_and_says_for_whom() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer()
    with held(lambda: between_writes("saving model-7")):
        for call in (lambda: w.assign(np.ones(4)), optimizer.state_dict, lambda: apply_step(w)):
            with pytest.raises(DeadlineExceededError, match='"other", which is saving model-7'):
                call()
    with held(writing), pytest.raises(DeadlineExceededError, match=r'"other".* middle of a step'):
        optimizer.state_dict()
    assert not w.numpy().any()
    apply_step(w)
    optimizer.state_dict()


@pytest.mark.usefixtures("short_deadline")
def test_a_save_that_goes_on_is_waited_for_beyond_the_deadline() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    with between_writes("testing"):
        thread = InThread(lambda: w.assign(np.ones(4)))
        for _ in range(15):
            time.sleep(0.02)
            gate.note_progress()
    thread.join()


# Interrupts.


def test_an_exception_at_any_moment_leaves_the_gate_open() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer()

    def everything() -> None:
        with writing(), writing():
            w.assign(np.ones(4))
        with between_writes("testing"), between_writes("testing again"):
            w.numpy()
        with between_writes("testing", writes=True), writing():
            w.assign(np.ones(4))
        optimizer.state_dict()

    def writes_and_saves() -> None:
        w.assign(np.zeros(4))
        optimizer.state_dict()

    writes_and_saves()
    for interrupt in each_moment(least=100):
        with suppress(Interrupt), interrupt:
            everything()
        InThread(writes_and_saves).join()
        writes_and_saves()


def test_an_exception_at_any_moment_of_a_wait_leaves_the_gate_open() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer()

    def interrupted_at(moment: int, call: Callable[[], Any]) -> bool:
        with InterruptAt(moment):
            try:
                call()
            except Interrupt:
                return True
        return False

    def check() -> None:
        w.assign(np.zeros(4))
        optimizer.state_dict()

    for moment in range(1, 60):
        with held(lambda: between_writes("testing")):
            assert interrupted_at(moment, lambda: w.assign(np.ones(4)))
        with held(lambda: between_writes("testing")):
            assert interrupted_at(moment, optimizer.state_dict)
        with held(writing):
            assert interrupted_at(moment, optimizer.state_dict)
        InThread(check).join()
        check()


def test_a_signal_handler_may_save_except_in_the_middle_of_a_step() -> None:
    w = Variable(np.zeros(4, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer()
    saved = []

    def save(*_: Any) -> None:
        saved.append(optimizer.state_dict()["name"])

    def hold() -> None:
        with between_writes("testing"):
            held.set()
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.1)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        with writing(), pytest.raises(RuntimeError, match="in the middle of a step"):
            signal.raise_signal(signal.SIGUSR1)
        with between_writes("testing"):
            signal.raise_signal(signal.SIGUSR1)
        held = threading.Event()
        thread = InThread(hold)
        assert held.wait(30)
        w.assign(np.ones(4))  # the signal comes in this wait
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert saved == ["Adam", "Adam"]


def test_a_signal_handler_that_saves_waits_for_writes_even_if_it_comes_in_such_a_wait() -> None:
    inside = threading.Event()
    seen = []

    def write() -> None:
        with writing():
            inside.set()
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.1)
            inside.clear()

    def save(*_: Any) -> None:
        with between_writes("testing"):
            seen.append(inside.is_set())

    before = signal.signal(signal.SIGUSR1, save)
    try:
        thread = InThread(write)
        assert inside.wait(30)
        with between_writes("testing"):
            pass
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [False]


def test_a_write_by_a_signal_handler_is_refused_where_a_save_was_not_seen_yet() -> None:
    """The thread may have locked its passage just after the save had looked at it."""
    w = Variable(np.zeros(4, np.float32), name="w")
    torn = []

    def save() -> None:
        with between_writes("testing"):
            before = w.numpy()
            closed.set()
            time.sleep(0.01)
            torn.append((w.numpy() != before).any())

    class Handler:
        """Comes when the thread has locked its passage, and a save has just begun."""

        def __init__(self, lock: Any) -> None:
            self.lock, self.is_wanted = lock, True
            self.release = lock.release
            self.locked = lock.locked

        def acquire(self) -> bool:
            if self.is_wanted:
                self.is_wanted = False
                threads.append(InThread(save))
                assert closed.wait(30)
                taken: bool = self.lock.acquire()
                with pytest.raises(RuntimeError, match=r'handler cannot write .* "other", which'):
                    w.assign(np.ones(4))
                return taken
            return bool(self.lock.acquire())

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    closed = threading.Event()
    threads: list[InThread] = []
    w.assign(np.zeros(4))
    passage = gate._passages[threading.get_ident()]
    lock = passage.lock
    passage.lock = Handler(lock)
    try:
        w.assign(np.full(4, 2.0))
    finally:
        passage.lock = lock
    threads[0].join()
    assert torn == [False]
    assert (w.numpy() == 2).all()
