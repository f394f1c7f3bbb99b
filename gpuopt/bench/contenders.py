"""gpuopt, and array code, doing the same work; `peers` has other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gpuopt
from gpuopt import environment
from gpuopt.bench.clock import Step
from gpuopt.bench.jobs import Job

_COMPILED = "GPUOPT_COMPILED"
# Weights; every contender updates them in place, torch included.
Arrays = Sequence[Any]
# Sets of gradients of all weights. Each step uses the next set, in a cycle.
GradientSets = Sequence[Arrays]
# Sparse gradients, one for each table: (values, rows).
Lookups = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Contender:
    """Does one step when it is called.

    Attributes:
        step: The step.
        state: Returns the arrays of the optimizer's state, after a step or more; None where they
            are not known.
        prepare: Called before a step is timed, and not timed itself.
        is_ours: Whether the step is gpuopt's.
        finish: Waits for the end of all steps, where the clock does not see it: they run on streams
            of their own.
    """

    step: Step
    state: Callable[[], Iterable[Any]] | None
    prepare: Step = lambda: None
    is_ours: bool = False
    finish: Step | None = None

    def __call__(self) -> object:
        return self.step()

    def step_to_its_end(self) -> None:
        """Does one step, and waits for it where the clock would not see it."""
        self.step()
        if self.finish is not None:
            self.finish()

    def count_state_bytes(self) -> int | None:
        return None if self.state is None else sum(array.nbytes for array in self.state())


# Makes a contender's step of (weights, gradients); a gradient of a table is IndexedSlices.
StepMaker = Callable[[list[Any], list[Any]], Step]


def make_users_step(
    name: str, make: StepMaker, weights: list[Any], gradients: list[Any]
) -> Contender:
    """Makes the step of a user's own optimizer.

    Raises:
        TypeError: `make` does not return a function.
    """
    step = make(weights, gradients)
    if not callable(step):
        raise TypeError(
            f"{name} must return a function that makes a step, and returned {type(step).__name__}"
        )
    return Contender(step, None)


def make_our_dense_step(
    job: Job, weights: Arrays, gradients: GradientSets, compiled: bool = True
) -> Contender:
    """Makes gpuopt's step.

    Args:
        job: The optimizer.
        weights: The variables' arrays, which are updated in place.
        gradients: Their gradients.
        compiled: Whether rules may be compiled, for arrays in host memory.
    """
    variables = [gpuopt.Variable(weight, copy=False) for weight in weights]
    optimizer = job.ours()
    sets = cycle(gradients)

    def step() -> None:
        optimizer.apply_gradients(list(zip(next(sets), variables, strict=True)))

    return make_our_step(optimizer, step, compiled)


def make_our_sparse_step(
    make: Callable[[], gpuopt.Optimizer], tables: Arrays, lookups: Lookups, compiled: bool = True
) -> Contender:
    """Makes gpuopt's step of tables by sparse gradients; see `make_our_dense_step`."""
    optimizer = make()
    pairs = [
        (gpuopt.IndexedSlices(values, rows), gpuopt.Variable(table, copy=False))
        for table, (values, rows) in zip(tables, lookups, strict=True)
    ]
    return make_our_step(optimizer, lambda: optimizer.apply_gradients(pairs), compiled)


@contextmanager
def compiled_as_now() -> Iterator[None]:
    """Afterwards, rules are compiled if they were before: contenders choose it for themselves."""
    before = os.environ.get(_COMPILED)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_COMPILED, None)
        else:
            os.environ[_COMPILED] = before
        environment.forget()


def make_our_step(optimizer: gpuopt.Optimizer, step: Step, compiled: bool) -> Contender:
    """Makes a contender of a step of gpuopt's; see `make_our_dense_step`."""

    def choose() -> None:
        os.environ[_COMPILED] = "1" if compiled else "0"
        environment.forget()
        environment.settings()  # read here, and in no step that is timed

    def state() -> list[Any]:
        return [each.numpy() for each in optimizer.variables()]

    return Contender(step, state, choose, is_ours=True)


def make_elementwise_dense_step(
    job: Job, xp: Any, weights: Arrays, gradients: GradientSets
) -> Contender:
    """Makes a step of one kernel for each parameter, as Thinc and Chainer have it."""
    inputs = ", ".join(f"T {name}" for name in ("grad", *job.elementwise.scalars))
    outputs = ", ".join(f"T {name}" for name in ("w", *job.state))
    kernel = xp.ElementwiseKernel(inputs, outputs, job.elementwise.body, "one_parameter")

    def update(w: Any, g: Any, state: Arrays, scalars: Sequence[float]) -> None:
        kernel(g, *scalars, w, *state)

    return _make_step_one_by_one(job, xp, weights, gradients, update)


def make_naive_dense_step(job: Job, xp: Any, weights: Arrays, gradients: GradientSets) -> Contender:
    """Makes a step by the formula in array operations."""

    def update(w: Any, g: Any, state: Arrays, scalars: Sequence[float]) -> None:
        job.formula(w, g, *state, *scalars)

    return _make_step_one_by_one(job, xp, weights, gradients, update)


def _make_step_one_by_one(
    job: Job, xp: Any, weights: Arrays, gradients: GradientSets, update: Callable[..., None]
) -> Contender:
    states = [_make_state(job, xp, weight) for weight in weights]
    sets = cycle(gradients)
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        scalars = job.scalars(t)
        for w, g, state in zip(weights, next(sets), states, strict=True):
            update(w, g, state, scalars)

    return Contender(step, lambda: [array for state in states for array in state])


def _make_state(job: Job, xp: Any, weight: Any) -> list[Any]:
    return [xp.full(weight.shape, value, dtype=weight.dtype) for value in job.state.values()]


def make_naive_sparse_step(job: Job, xp: Any, tables: Arrays, lookups: Lookups) -> Contender:
    """Makes a step that sums repeated rows by `unique`, copies the rows, and writes them back."""
    states = [_make_state(job, xp, table) for table in tables]
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        for table, of_table, (values, rows) in zip(tables, states, lookups, strict=True):
            arrays = [table, *of_table]
            unique, inverse = xp.unique(rows, return_inverse=True)
            sums = xp.zeros((unique.size, values.shape[1]), dtype=values.dtype)
            xp.add.at(sums, inverse.reshape(-1), values)
            weight, *state = (array[unique] for array in arrays)
            job.formula(weight, sums, *state, *job.scalars(t))
            for array, taken in zip(arrays, (weight, *state), strict=True):
                array[unique] = taken

    return Contender(step, lambda: [array for state in states for array in state])


def cycle(sets: GradientSets) -> Iterator[Sequence[Any]]:
    """Yields the sets of gradients in turn, for ever."""
    while True:
        yield from sets
