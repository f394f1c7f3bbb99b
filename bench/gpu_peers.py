"""The alternatives to gpuopt on a GPU, doing the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import gpuopt

Step = Callable[[], object]
# Weights; every contender updates them in place, torch included.
Arrays = Sequence[Any]
# Sets of gradients of all weights. Each step uses the next set, in a cycle.
GradientSets = Sequence[Arrays]

RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.9


class Place(NamedTuple):
    """The device of the contenders' arrays.

    Attributes:
        xp: CuPy, or numpy where there is no GPU.
        torch_device: torch's name of the same device.
    """

    xp: Any
    torch_device: str


class Elementwise(NamedTuple):
    """A rule as Thinc and Chainer run it: one `cupy.ElementwiseKernel` for each parameter.

    Attributes:
        scalars: The names of the step's scalars.
        body: C++ that updates one element of `w` and of the state, by one element of `grad`.
    """

    scalars: Sequence[str]
    body: str


class Job(NamedTuple):
    """One optimizer, in gpuopt and in the alternatives.

    Attributes:
        title: The optimizer's name.
        state: The names of its state arrays, with their first values.
        ours: Makes gpuopt's optimizer.
        torch: Makes torch's optimizer from (torch, parameters, implementation).
        scalars: Returns the scalars of step t; the first step has t = 1.
        elementwise: The rule in C++, with `scalars`.
        formula: The rule in array operations on (w, g, *state, *scalars). Updates w and state.
    """

    title: str
    state: Mapping[str, float]
    ours: Callable[[], gpuopt.Optimizer]
    torch: Callable[..., Any]
    scalars: Callable[[int], Sequence[float]]
    elementwise: Elementwise
    formula: Callable[..., None]


def _adam(w: Any, g: Any, m: Any, v: Any, *scalars: float) -> None:
    step_size, one_minus_beta1, one_minus_beta2, epsilon = scalars
    m += one_minus_beta1 * (g - m)
    v += one_minus_beta2 * (g**2 - v)
    w -= step_size * m / (np.sqrt(v) + epsilon)


def _momentum(w: Any, g: Any, a: Any, rate: float, decay: float) -> None:
    a[...] = decay * a + g
    w -= rate * a


def _adagrad(w: Any, g: Any, n: Any, rate: float) -> None:
    n += g**2
    w -= rate * g / np.sqrt(n)


def _adam_step_size(t: int) -> float:
    return float(RATE * np.sqrt(1 - BETA2**t) / (1 - BETA1**t))


JOBS: Mapping[str, Job] = {
    "adam": Job(
        "Adam",
        {"m": 0.0, "v": 0.0},
        lambda: gpuopt.AdamOptimizer(RATE, BETA1, BETA2, EPSILON),
        lambda torch, p, form: torch.optim.Adam(p, RATE, (BETA1, BETA2), EPSILON, **form),
        lambda t: [_adam_step_size(t), 1 - BETA1, 1 - BETA2, EPSILON],
        Elementwise(
            ["step_size", "one_minus_beta1", "one_minus_beta2", "epsilon"],
            "m += one_minus_beta1 * (grad - m);"
            "v += one_minus_beta2 * (grad * grad - v);"
            "w -= step_size * m / (sqrt(v) + epsilon);",
        ),
        _adam,
    ),
    "momentum": Job(
        "Momentum",
        {"a": 0.0},
        lambda: gpuopt.MomentumOptimizer(RATE, DECAY),
        lambda torch, p, form: torch.optim.SGD(p, RATE, momentum=DECAY, **form),
        lambda t: [RATE, DECAY],
        Elementwise(["rate", "decay"], "a = decay * a + grad; w -= rate * a;"),
        _momentum,
    ),
    "adagrad": Job(
        "Adagrad",
        {"n": 0.1},
        lambda: gpuopt.AdagradOptimizer(RATE),
        lambda torch, p, form: torch.optim.Adagrad(p, RATE, initial_accumulator_value=0.1, **form),
        lambda t: [RATE],
        Elementwise(["rate"], "n += grad * grad; w -= rate * grad / sqrt(n);"),
        _adagrad,
    ),
}


def make_our_dense_step(job: Job, weights: Arrays, gradients: GradientSets) -> Step:
    variables = [gpuopt.Variable(weight, copy=False) for weight in weights]
    optimizer = job.ours()
    sets = _cycle(gradients)
    return lambda: optimizer.apply_gradients(list(zip(next(sets), variables, strict=True)))


def make_torch_dense_step(
    job: Job, weights: Arrays, gradients: GradientSets, form: Mapping[str, bool]
) -> Step:
    import torch

    parameters = [torch.nn.Parameter(torch.from_dlpack(weight)) for weight in weights]
    tensors = [[torch.from_dlpack(gradient) for gradient in of_set] for of_set in gradients]
    optimizer = job.torch(torch, parameters, form)
    for parameter, tensor in zip(parameters, tensors[0], strict=True):
        parameter.grad = tensor
    if len(tensors) == 1:
        return lambda: optimizer.step()
    sets = _cycle(tensors)

    def step() -> None:
        for parameter, tensor in zip(parameters, next(sets), strict=True):
            parameter.grad = tensor
        optimizer.step()

    return step


def why_not_torch(job: Job, place: Place, form: Mapping[str, bool]) -> str | None:
    """Returns why torch lacks this implementation here, or None: tries a step on one element."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    parameter = torch.nn.Parameter(torch.ones(1, device=place.torch_device))
    parameter.grad = torch.ones_like(parameter)
    try:
        job.torch(torch, [parameter], form).step()
    except (NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def make_elementwise_dense_step(
    job: Job, xp: Any, weights: Arrays, gradients: GradientSets
) -> Step:
    inputs = ", ".join(f"T {name}" for name in ("grad", *job.elementwise.scalars))
    outputs = ", ".join(f"T {name}" for name in ("w", *job.state))
    kernel = xp.ElementwiseKernel(inputs, outputs, job.elementwise.body, "one_parameter")

    def update(w: Any, g: Any, state: Arrays, scalars: Sequence[float]) -> None:
        kernel(g, *scalars, w, *state)

    return _make_step_one_by_one(job, xp, weights, gradients, update)


def make_naive_dense_step(job: Job, xp: Any, weights: Arrays, gradients: GradientSets) -> Step:
    def update(w: Any, g: Any, state: Arrays, scalars: Sequence[float]) -> None:
        job.formula(w, g, *state, *scalars)

    return _make_step_one_by_one(job, xp, weights, gradients, update)


def _make_step_one_by_one(
    job: Job, xp: Any, weights: Arrays, gradients: GradientSets, update: Callable[..., None]
) -> Step:
    states = [_make_state(job, xp, weight) for weight in weights]
    sets = _cycle(gradients)
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        scalars = job.scalars(t)
        for w, g, state in zip(weights, next(sets), states, strict=True):
            update(w, g, state, scalars)

    return step


def _make_state(job: Job, xp: Any, weight: Any) -> list[Any]:
    return [xp.full(weight.shape, value, dtype=weight.dtype) for value in job.state.values()]


def make_our_sparse_step(
    make: Callable[[], gpuopt.Optimizer], table: Any, values: Any, rows: Any
) -> Step:
    variable = gpuopt.Variable(table, copy=False)
    optimizer = make()
    slices = gpuopt.IndexedSlices(values, rows)
    return lambda: optimizer.apply_gradients([(slices, variable)])


def make_torch_sparse_step(
    make: Callable[[Any, Any], Any], table: Any, values: Any, rows: Any
) -> Step:
    import torch

    parameter = torch.nn.Parameter(torch.from_dlpack(table))
    optimizer = make(torch, [parameter])
    indices, given = torch.from_dlpack(rows)[None], torch.from_dlpack(values)

    def step() -> None:
        # A new tensor in each step: torch marks a tensor whose rows are summed, and skips the work.
        parameter.grad = torch.sparse_coo_tensor(
            indices, given, tuple(table.shape), check_invariants=False
        )
        optimizer.step()

    return step


def make_naive_sparse_step(job: Job, xp: Any, table: Any, values: Any, rows: Any) -> Step:
    """Makes a step that sums repeated rows by `unique`, copies the rows, and writes them back."""
    arrays = [table, *_make_state(job, xp, table)]
    t = 0

    def step() -> None:
        nonlocal t
        t += 1
        unique, inverse = xp.unique(rows, return_inverse=True)
        sums = xp.zeros((unique.size, values.shape[1]), dtype=values.dtype)
        xp.add.at(sums, inverse.reshape(-1), values)
        weight, *state = (array[unique] for array in arrays)
        job.formula(weight, sums, *state, *job.scalars(t))
        for array, taken in zip(arrays, (weight, *state), strict=True):
            array[unique] = taken

    return step


def _cycle(sets: GradientSets) -> Iterator[Sequence[Any]]:
    while True:
        yield from sets
