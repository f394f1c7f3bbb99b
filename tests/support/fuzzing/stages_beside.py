"""Operations of random programs of all stages in which others than one step take part.

Copies of the optimizer, forked children, other threads' optimizers, and gradients that are views of
the variables.
"""

from __future__ import annotations

import copy
import gc
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

import gpuopt
from fuzzing.threads import in_background, in_child
from gpuopt.distributed.wrapper import OptimizerWrapper

if TYPE_CHECKING:
    from fuzzing.all_stages import Program


def copied(program: Program) -> None:
    """The optimizer goes on as a copy: with copies of its variables, or with the same ones."""
    program.check()
    together = program.real, program.counter, program.averages, program.whole
    is_bare = program.whole is program.own and program.averages is None
    how = program.choose(["deeply", "pickled", *(["alone"] if is_bare else [])])
    if how == "alone":
        program.whole = copy.copy(program.whole)
    else:
        is_pickled = how == "pickled" and program.rate != "function"
        together = pickle.loads(pickle.dumps(together)) if is_pickled else copy.deepcopy(together)
        program.real, program.counter, program.averages, program.whole = together
    del together
    program.own = program.whole
    while isinstance(program.own, OptimizerWrapper):
        if isinstance(program.own, gpuopt.LossScaleOptimizer):
            program.scaled = program.own
        program.own = program.own._inner
    gc.collect()  # two optimizers cannot keep master copies of one variable
    program.check()


def forked(program: Program) -> None:
    """A child makes a step and compares everything; the parent goes on as if there were none."""
    if program.device != "cpu":
        return  # CUDA does not outlive a fork

    def child() -> list[str]:
        program.step()
        program.check()
        return []

    in_child(child)


def beside_another(program: Program) -> None:
    """Another thread steps on another variable by another optimizer."""
    made: list[None] = []
    other, optimizer = program.other, gpuopt.MomentumOptimizer(1.0, 0.0)

    def work() -> None:
        optimizer.apply_gradients([(np.ones(3, np.float32), other)])
        made.append(None)

    with in_background(work):
        program.step()
    program.expected_other = program.expected_other - len(made)


def step_by_views(program: Program) -> None:
    """Gradients are in the variables' own memory: themselves, backwards, or one number for all."""
    program.check()
    views: dict[str, Any] = {}
    for label, variable in program.real.items():
        storage = variable.storage
        if program.places[label] != "cpu" or program.rng.random() < 0.25:
            continue
        views[label] = program.choose(
            [storage, storage[..., ::-1] if storage.ndim else storage, _first_of_all(storage)]
        )
    if views:
        copies = {label: view.copy() for label, view in views.items()}
        program.apply(views)
        program.follow(copies)


def _first_of_all(array: Any) -> Any:
    return np.broadcast_to(array.reshape(-1)[:1].reshape(()), array.shape)
