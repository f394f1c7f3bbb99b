"""Ctrl-C is not lost, wherever it comes in a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

import numpy as np
import pytest
from interrupt_at import Interrupt, InterruptAt, each_moment

import gpuopt
from gpuopt import Variable
from gpuopt.interrupts import interrupts_put_off
from gpuopt.variables import unfinished


class Hooked(gpuopt.MomentumOptimizer):
    def _apply_dense(self, grad: Any, var: Variable) -> None:
        super()._apply_dense(grad, var)


def step_of_hooks() -> Callable[[], None]:
    w, other = Variable(np.ones(3)), Variable(np.ones(2))
    optimizer = Hooked(0.1, 0.9)
    return lambda: optimizer.apply_gradients([(np.ones(3), w), (None, other)])


def step_of_new_arrays() -> Callable[[], None]:
    w, kept = np.ones(3), []
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)

    def step() -> None:
        kept.append(w.copy())  # an array that ends inside has Python lose exceptions
        optimizer.apply_gradients([(np.ones(3), kept[-1]), (np.ones(3), w)])

    return step


def step_of_some_sums() -> Callable[[], None]:
    weights = [Variable(np.ones(3), name=name) for name in ("kernel", "bias")]
    optimizer = gpuopt.LARSOptimizer(0.1, skip_list=["bias"])
    return lambda: optimizer.apply_gradients([(np.ones(3), each) for each in weights])


def minimization() -> Callable[[], None]:
    w = Variable(np.ones(3))
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)
    return lambda: optimizer.minimize(lambda: np.sum(w * w))


def clipping() -> Callable[[], Any]:
    arrays = [np.ones(3), np.ones(2, np.float32), None]
    return lambda: gpuopt.clip_by_global_norm(arrays, 1.0)


def change_of_rows() -> Callable[[], None]:
    w, table = Variable(np.ones(4)), Variable(np.ones((4, 2)))
    return lambda: gpuopt.rows([w, table]).reset([1])


@pytest.mark.parametrize(
    ("make", "inside"),
    [
        (step_of_hooks, ""),
        # Of its thousand moments, those where it looks for shared memory.
        (step_of_new_arrays, "overlap.py"),
        (step_of_some_sums, ""),
        (minimization, ""),
        (clipping, ""),
        (change_of_rows, ""),
    ],
)
def test_no_interrupt_is_lost(make: Callable[[], Callable[[], Any]], inside: str) -> None:
    call = make()
    for _ in range(2):  # what is imported and made once
        call()
    for moment in range(1, 10_000):
        interrupts = InterruptAt(moment, inside=[inside])
        unfinished.begun.clear()
        try:
            with interrupts:
                call()
        except Interrupt:
            continue
        assert interrupts.left > 0, "the interrupt was lost"
        break
    assert moment > 8


@pytest.mark.parametrize("waits_for_begin", [False, True])
def test_another_signals_exception_leaves_no_handler(waits_for_begin: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    context = interrupts_put_off(waits_for_begin=waits_for_begin)
    for interrupt in each_moment(["interrupts.py"], least=6):
        try:
            with interrupt, context:
                context.begin()
        except Interrupt as error:
            *_, (frame, line), _ = walk_tb(error.__traceback__)
            # Nothing can be done before the first line of its end.
            is_at_end = frame.f_code.co_name == "__exit__"
            if is_at_end and line == frame.f_code.co_firstlineno:
                signal.signal(signal.SIGINT, before)
        assert signal.getsignal(signal.SIGINT) is before, interrupt.moment


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_another_thread_forks_meanwhile_is_interrupted() -> None:
    codes: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(signal.SIGINT) is before else 1)
        codes.append(os.waitpid(child, 0)[1])

    with interrupts_put_off():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is not before
    assert codes == [0]
