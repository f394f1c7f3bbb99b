"""Ctrl-C is not lost, wherever it comes in a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from gpuopt import Variable


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
        try:
            with interrupts:
                call()
        except Interrupt:
            continue
        assert interrupts.left > 0, "the interrupt was lost"
        break
    assert moment > 10
