"""Locks and waits end: after a deadline that says for whom, and after Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from interrupt_at import Interrupt, InterruptAt, each_moment
from other_thread import held, in_threads

import gpuopt
from gpuopt import DeadlineExceededError, Variable, locks
from gpuopt.backends.cpu import compiler
from gpuopt.backends.cpu.threads import share_out
from gpuopt.locks import Condition, Lock, call_if_free, call_locked


def is_free(lock: Lock) -> bool:
    found = []

    def take() -> None:
        found.append(lock._lock.acquire(blocking=False))
        if found[0]:
            lock._lock.release()

    in_threads(take)
    return found[0]


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DEADLINE_S", 0.05)


@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize("make", [Lock, Condition])
def test_a_wait_for_a_lock_ends_and_says_which(make: type[Lock]) -> None:
    free, lock = Lock("the free one"), make("the rows")
    with held(lambda: lock):
        with pytest.raises(DeadlineExceededError, match="release the lock of the rows"), lock:
            pass
        with pytest.raises(DeadlineExceededError, match="release the lock of the rows"):
            call_locked([free, lock, Lock("another")], lambda: None)
        assert is_free(free)
    with lock, lock:
        assert not is_free(lock)
    assert is_free(lock)
    assert call_locked([free, lock, lock], lambda: is_free(free)) is False
    assert is_free(free)
    assert is_free(lock)


@pytest.mark.usefixtures("short_deadline")
def test_a_locked_step_waits_for_a_variable_no_longer_than_the_deadline() -> None:
    w = Variable(np.zeros(3), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0, use_locking=True)
    with held(lambda: w.identity.lock):
        with pytest.raises(DeadlineExceededError, match='variable "w"'):
            optimizer.apply_gradients([(np.ones(3), w)])
        with pytest.raises(DeadlineExceededError, match='variable "w"'):
            w.assign(np.ones(3), use_locking=True)
    optimizer.apply_gradients([(np.ones(3), w)])
    assert (w.numpy() == -1).all()


@pytest.mark.usefixtures("short_deadline")
def test_a_wait_for_a_helping_thread_ends() -> None:
    go_on, helping = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert helping.wait(30)
        else:
            helping.set()
            assert go_on.wait(30)

    try:
        with pytest.raises(DeadlineExceededError, match="a thread that shares an update"):
            share_out(work, range(2), 2)
    finally:
        go_on.set()


@pytest.mark.usefixtures("short_deadline")
def test_a_wait_for_a_save_in_the_background_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, sync = threading.Event(), os.fsync

    def pausing(descriptor: int) -> None:
        assert go_on.wait(30)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", pausing)
    saver = gpuopt.Saver([Variable(np.zeros(3), name="w")])
    future = saver.save_async(tmp_path / "m", 1)
    try:
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
        for wait in (future.result, future.exception, lambda: saver.save(tmp_path / "m", 2)):
            with pytest.raises(DeadlineExceededError, match=r"a thread that is saving .*m"):
                wait()
        assert not future.done()
    finally:
        go_on.set()
    monkeypatch.setattr(locks, "DEADLINE_S", 30)
    assert future.result() == str(tmp_path / "m-1.safetensors")
    assert future.done()
    assert future.exception() is None


def test_a_compiler_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(compiler, "_DEADLINE_S", 0.05)
    began = time.monotonic()
    assert compiler.build("never", "int x;", []) is None
    assert time.monotonic() - began < 30
    assert "cannot build never" in caplog.text
    assert "has not ended within 0.05 s" in caplog.text


def test_an_exception_at_any_moment_leaves_locks_open() -> None:
    first, second = Lock("one"), Condition("two")

    def everything() -> None:
        with first, first:
            pass
        with second:
            second.notify_all()
            second.wait_for(lambda: True, 1)
        with first:
            call_locked([first, second], lambda: None)
        call_if_free(first, lambda: None)

    for interrupt in each_moment(least=20):
        with suppress(Interrupt), interrupt:
            everything()
        assert is_free(first), interrupt.moment
        assert is_free(second), interrupt.moment


def test_an_exception_at_any_moment_of_a_wait_for_a_notice_leaves_the_lock_open() -> None:
    condition = Condition("a notice")
    interrupted = 0
    for moment in range(1, 40):
        given: list[int] = []

        def give(given: list[int] = given) -> None:
            time.sleep(0.002)
            with condition:
                given.append(1)
                condition.notify_all()

        thread = threading.Thread(target=give)
        thread.start()
        try:
            with InterruptAt(moment), condition:
                assert condition.wait_for(given.copy, 30)
        except Interrupt:
            interrupted += 1
        thread.join()
        assert is_free(condition), moment
    assert interrupted > 10


def test_a_lost_notice_is_not_waited_for() -> None:
    condition = Condition("a notice")
    seen = []

    def lose() -> None:
        time.sleep(0.05)
        seen.append(True)  # and Ctrl-C before notify_all

    thread = threading.Thread(target=lose)
    began = time.monotonic()
    with condition:
        thread.start()
        assert condition.wait_for(lambda: bool(seen), 30)
    thread.join()
    assert time.monotonic() - began < 10


def test_a_call_is_made_only_if_no_other_thread_holds_the_lock() -> None:
    lock = Lock("one")
    seen = []
    with held(lambda: lock):
        assert not call_if_free(lock, lambda: seen.append("held"))
        assert not lock.is_this_threads
    assert call_if_free(lock, lambda: seen.append(lock.is_this_threads))
    assert seen == [True]
    assert is_free(lock)
    with pytest.raises(ZeroDivisionError):
        call_if_free(lock, lambda: 1 / 0)
    assert is_free(lock)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_at_any_moment_of_a_fork_leaves_imports_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = os.getpid()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    for moment in range(1, 30):
        child = None
        with suppress(Interrupt), InterruptAt(moment):
            child = os.fork()
        if os.getpid() != parent:
            os._exit(0 if is_free(locks.importing) else 1)
        assert is_free(locks.importing), moment
        if child is not None:
            assert os.waitpid(child, 0)[1] == 0, moment


def test_a_second_exception_at_any_moment_leaves_no_thread_at_work() -> None:
    working: set[int] = set()
    helping = threading.Event()

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert helping.wait(30)
            raise Interrupt
        working.add(number)
        helping.set()
        time.sleep(0.0005)
        working.discard(number)

    # Of what share_out does after the first one.
    for interrupt in each_moment([gpuopt.backends.cpu.threads.__file__], least=20):
        helping.clear()
        with suppress(Interrupt), interrupt:
            share_out(work, range(6), 3)
        assert not working, interrupt.moment


def test_ctrl_c_again_and_again_leaves_no_thread_at_work() -> None:
    helping, ended, times = threading.Event(), threading.Event(), iter(range(1, 4))

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert helping.wait(30)
            raise Interrupt(0)
        helping.set()
        for _ in range(3):
            time.sleep(0.02)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        time.sleep(0.02)
        ended.set()

    def interrupt(*_: object) -> None:
        raise Interrupt(next(times))

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt) as raised:
            share_out(work, range(2), 2)
        is_over = ended.is_set()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        ended.wait(30)
        signal.signal(signal.SIGUSR1, before)
    assert is_over
    assert raised.value.args == (3,)  # the last one


def test_an_exception_at_any_moment_leaves_no_thread_at_work() -> None:
    working: set[int] = set()

    def work(number: int) -> None:
        working.add(number)
        time.sleep(0.0005)
        working.discard(number)

    for interrupt in each_moment(least=20):
        working.clear()
        with suppress(Interrupt), interrupt:
            share_out(work, range(6), 3)
        # Of the interrupted thread, its own task may be left.
        left = set(working)
        time.sleep(0.002)
        assert working == left, interrupt.moment
