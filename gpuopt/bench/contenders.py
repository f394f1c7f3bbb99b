"""gpuopt, and array code, doing the same work; `peers` has other libraries."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import gpuopt
from gpuopt import environment
from gpuopt.bench.clock import Step
from gpuopt.bench.jobs import Job, Place

_COMPILED = "GPUOPT_COMPILED"
# Weights; every contender updates them in place, torch included.
Arrays = Sequence[Any]
# Sets of gradients of all weights; that of a table may be IndexedSlices. Each step uses the next
# set, in a cycle.
GradientSets = Sequence[Sequence[Any]]


class ContenderError(Exception):
    """A user's own contender has failed: names it, its error, and the line where it failed."""


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
    state: Callable[[], Iterable[Any]] | None = None
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


def as_contender(step: Step) -> Contender:
    """Returns a step as a contender; of a bare function, no state is known."""
    return step if isinstance(step, Contender) else Contender(step)


@dataclass(frozen=True)
class Setting:
    """What all contenders of a task have in common.

    Attributes:
        job: The optimizer.
        dtype: Of the weights.
        place: Where they are.
        shapes: Of the weights.
        gradients: Of all contenders.
    """

    job: Job
    dtype: str
    place: Place
    shapes: Sequence[tuple[int, ...]]
    gradients: GradientSets

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.gradients[0][0], gpuopt.IndexedSlices)

    def weights(self) -> list[Any]:
        """Makes weights, of which each contender has its own."""
        dtype = self.gradients[0][0].dtype
        return [self.place.xp.ones(shape, dtype=dtype) for shape in self.shapes]


# Makes a contender's step of (weights, gradients); a gradient of a table is IndexedSlices.
StepMaker = Callable[[list[Any], list[Any]], Step]


def make_users_step(
    name: str, make: StepMaker, weights: list[Any], gradients: list[Any]
) -> Contender:
    """Makes the step of a user's own optimizer.

    Raises:
        ContenderError: `make` fails, or returns no function. The step raises it, too.
    """
    try:
        own_step = make(weights, gradients)
    except Exception as error:
        raise _name_failure(name, error) from error
    if not callable(own_step):
        raise ContenderError(
            f"{name} must return a function that makes a step, and returned "
            f"{type(own_step).__name__}"
        )

    def step() -> None:
        try:
            own_step()
        except Exception as error:
            raise _name_failure(name, error) from error

    return Contender(step)


def _name_failure(name: str, error: Exception) -> ContenderError:
    *_, last = traceback.extract_tb(error.__traceback__)
    where = f"{last.filename}, line {last.lineno}"
    return ContenderError(f"{name} failed in {where}: {type(error).__name__}: {error}")


def make_our_step(
    make: Callable[[], gpuopt.Optimizer],
    weights: Arrays,
    gradients: GradientSets,
    compiled: bool = True,
) -> Contender:
    """Makes gpuopt's step.

    Args:
        make: Makes the optimizer.
        weights: The variables' arrays, which are updated in place.
        gradients: Their gradients.
        compiled: Whether rules may be compiled, for arrays in host memory.
    """
    variables = [gpuopt.Variable(weight, copy=False) for weight in weights]
    optimizer = make()
    sets = cycle(gradients)

    def step() -> None:
        optimizer.apply_gradients(list(zip(next(sets), variables, strict=True)))

    return make_contender(optimizer, step, compiled)


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


def make_contender(optimizer: gpuopt.Optimizer, step: Step, compiled: bool) -> Contender:
    """Makes a contender of a step of gpuopt's; see `make_our_step`."""

    def choose() -> None:
        os.environ[_COMPILED] = "1" if compiled else "0"
        environment.forget()
        environment.settings()  # read here, and in no step that is timed

    def state() -> list[Any]:
        return [each.numpy() for each in optimizer.variables()]

    return Contender(step, state, choose, is_ours=True)


def make_elementwise_step(job: Job, xp: Any, weights: Arrays, gradients: GradientSets) -> Contender:
    """Makes a step of one kernel for each parameter, as Thinc and Chainer have it."""
    inputs = ", ".join(f"T {name}" for name in ("grad", *job.elementwise.scalars))
    outputs = ", ".join(f"T {name}" for name in ("w", *job.state))
    kernel = xp.ElementwiseKernel(inputs, outputs, job.elementwise.body, "one_parameter")

    def update(w: Any, g: Any, state: Arrays, scalars: Sequence[float]) -> None:
        kernel(g, *scalars, w, *state)

    return _make_step_one_by_one(job, xp, weights, gradients, update)


def make_naive_step(job: Job, xp: Any, weights: Arrays, gradients: GradientSets) -> Contender:
    """Makes a step by the formula in array operations.

    Repeated rows of a table are summed by `unique`; its rows are copied, and written back.
    """

    def update(w: Any, g: Any, state: Arrays, scalars: Sequence[float]) -> None:
        if not isinstance(g, gpuopt.IndexedSlices):
            job.formula(w, g, *state, *scalars)
            return
        arrays = [w, *state]
        unique, inverse = xp.unique(g.indices, return_inverse=True)
        sums = xp.zeros((unique.size, g.values.shape[1]), dtype=g.values.dtype)
        xp.add.at(sums, inverse.reshape(-1), g.values)
        weight, *of_rows = (array[unique] for array in arrays)
        job.formula(weight, sums, *of_rows, *scalars)
        for array, taken in zip(arrays, (weight, *of_rows), strict=True):
            array[unique] = taken

    return _make_step_one_by_one(job, xp, weights, gradients, update)


def _make_step_one_by_one(
    job: Job, xp: Any, weights: Arrays, gradients: GradientSets, update: Callable[..., None]
) -> Contender:
    states = [
        [xp.full(weight.shape, value, dtype=weight.dtype) for value in job.state.values()]
        for weight in weights
    ]
    sets = cycle(gradients)
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        scalars = job.scalars(t)
        for w, g, state in zip(weights, next(sets), states, strict=True):
            update(w, g, state, scalars)

    return Contender(step, lambda: [array for state in states for array in state])
