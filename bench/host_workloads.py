"""Workloads of updates in host memory, and the alternatives on a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import gpuopt
from bench.harness import NUMPY_ALONE, Workload
from gpuopt.backends import backend_for
from gpuopt.bench.models import LOOKUPS, TABLE, Shapes, draw_lookups, list_resnet50_shapes
from gpuopt.bench.peers import make_optax_step
from gpuopt.device import Device

Step = Callable[[], object]

_RATE = 1e-3
_DECAY = 0.01
_GROUPS = 40
# Longer than OpenMP's threads wait in a busy loop.
_REST_SECONDS = 0.01


def make_host_workloads() -> Iterator[Workload]:
    """Yields each workload when its turn comes, so that only one at a time is in memory.

    Each step is followed by a rest: after a step, torch's threads wait for more work in a busy loop
    for a while, and would take a core from the next contender.
    """
    for workload in _make_workloads():
        yield replace(workload, settle=partial(time.sleep, _REST_SECONDS))


def _make_workloads() -> Iterator[Workload]:
    large, medium = [(16 * 2**20,)], [(2**17,)]
    many_small = [(64,)] * 1000
    for job in _JOBS:
        for name, what, shapes in (
            ("16m", "one tensor of 16,777,216 elements", large),
            ("resnet50", "the 161 tensors of a ResNet-50", list(list_resnet50_shapes())),
            ("1000x64", "1,000 tensors of 64 elements each", many_small),
            ("128k", "one tensor of 131,072 elements", medium),
        ):
            yield _make_dense_workload(
                job, f"host_{job}_{name}", f"{_JOBS[job].title} on {what}", shapes
            )
    yield _make_sparse_workload(
        "lazy_adam", "LazyAdam", gpuopt.LazyAdamOptimizer, _torch_sparse_adam, slots=2
    )
    yield _make_sparse_workload(
        "adagrad", "Adagrad", gpuopt.AdagradOptimizer, _torch_sparse_adagrad, slots=1
    )
    row_wise: Sequence[tuple[str, str, Shapes]] = (
        ("vector", "one vector of 4,194,304 elements", [(2**22,)]),
        ("5_columns", "one table of 800,000 x 5", [(800_000, 5)]),
        ("64_columns", "one table of 65,536 x 64", [(2**16, 64)]),
        ("400x40x5", "400 tables of 40 x 5", [(40, 5)] * 400),
    )
    for which, what, of_variables in row_wise:
        yield _make_row_wise_workload(f"host_row_wise_{which}", what, of_variables)
    yield _make_groups_workload()
    yield _make_all_rows_workload()
    yield _make_row_sums_workload()


class _Job(NamedTuple):
    """One optimizer, in gpuopt and in the alternatives.

    Attributes:
        title: The optimizer's name.
        slots: How many state arrays each variable has.
        ours: Makes gpuopt's optimizer.
        formula: One step on (w, g, *state) in plain numpy; returns the new (w, *state).
        torch: Makes torch's optimizer from (torch, parameters, implementation).
        fused: Whether torch has a fused implementation for CPUs.
        optax: Makes optax's optimizer.
    """

    title: str
    slots: int
    ours: Callable[[], gpuopt.Optimizer]
    formula: Callable[..., tuple[np.ndarray, ...]]
    torch: Callable[..., Any]
    fused: bool
    optax: Callable[[Any], Any]

    def peers(self, gradients: Sequence[np.ndarray]) -> dict[str, Step]:
        peers: dict[str, Step] = {}
        if find_spec("torch") is not None:
            if self.fused:
                peers["torch fused"] = _make_torch_step(self.torch, {"fused": True}, gradients)
            peers["torch foreach"] = _make_torch_step(self.torch, {"foreach": True}, gradients)
        if find_spec("optax") is not None:
            peers["optax jit"] = make_optax_step(
                self.optax, [np.ones_like(gradient) for gradient in gradients], [gradients]
            )
        return peers


def _momentum(w: np.ndarray, g: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, ...]:
    a = 0.9 * a + g
    return w - _RATE * a, a


def _adagrad(w: np.ndarray, g: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, ...]:
    n = n + g**2
    return w - _RATE * g / np.sqrt(n + 1e-10), n


def _adam(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g**2
    return w - _RATE * (m / 0.1) / (np.sqrt(v / 0.001) + 1e-8), m, v


def _rms_prop(w: np.ndarray, g: np.ndarray, r: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
    r = 0.9 * r + 0.1 * g**2
    b = 0.9 * b + _RATE * g / np.sqrt(r + 1e-10)
    return w - b, r, b


def _adam_w(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    return _adam(w - _DECAY * _RATE * w, g, m, v)


_JOBS: Mapping[str, _Job] = {
    "momentum": _Job(
        "Momentum",
        1,
        lambda: gpuopt.MomentumOptimizer(_RATE, 0.9),
        _momentum,
        lambda torch, p, form: torch.optim.SGD(p, lr=_RATE, momentum=0.9, **form),
        True,
        lambda optax: optax.sgd(_RATE, momentum=0.9),
    ),
    "adagrad": _Job(
        "Adagrad",
        1,
        lambda: gpuopt.AdagradOptimizer(_RATE),
        _adagrad,
        lambda torch, p, form: torch.optim.Adagrad(p, lr=_RATE, **form),
        True,
        lambda optax: optax.adagrad(_RATE),
    ),
    "adam": _Job(
        "Adam",
        2,
        lambda: gpuopt.AdamOptimizer(_RATE),
        _adam,
        lambda torch, p, form: torch.optim.Adam(p, lr=_RATE, **form),
        True,
        lambda optax: optax.adam(_RATE),
    ),
    # TensorFlow's decay is not scaled by the learning rate.
    "adam_w": _Job(
        "AdamW",
        2,
        lambda: gpuopt.AdamWOptimizer(_DECAY * _RATE, _RATE),
        _adam_w,
        lambda torch, p, form: torch.optim.AdamW(p, lr=_RATE, weight_decay=_DECAY, **form),
        True,
        lambda optax: optax.adamw(_RATE, weight_decay=_DECAY),
    ),
    "rms_prop": _Job(
        "RMSProp with momentum",
        2,
        lambda: gpuopt.RMSPropOptimizer(_RATE, momentum=0.9),
        _rms_prop,
        lambda torch, p, form: torch.optim.RMSprop(p, lr=_RATE, alpha=0.9, momentum=0.9, **form),
        False,
        lambda optax: optax.rmsprop(_RATE, momentum=0.9),
    ),
}


def _make_dense_workload(job_name: str, name: str, description: str, shapes: Shapes) -> Workload:
    job = _JOBS[job_name]
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
    contenders: dict[str, Step] = {}
    for title, compiled in (("gpuopt", True), (NUMPY_ALONE, False)):
        variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
        pairs = list(zip(gradients, variables, strict=True))
        contenders[title] = _make_our_step(partial(job.ours().apply_gradients, pairs), compiled)
    contenders |= job.peers(gradients)
    contenders["numpy, the formula"] = _make_formula_step(job, gradients)
    elements = sum(gradient.size for gradient in gradients)
    # A step reads and writes the weight and the slots, and reads the gradient.
    return Workload(name, description, elements * 4 * (3 + 2 * job.slots), contenders)


def _make_groups_workload() -> Workload:
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape, np.float32) for shape in list_resnet50_shapes()]
    contenders: dict[str, Step] = {}
    for title, num_groups in (("gpuopt", _GROUPS), ("one group", 1)):
        for name, compiled in ((title, True), (f"{title}, numpy alone", False)):
            variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
            groups = [
                gpuopt.ParameterGroup(
                    variables=variables[i::num_groups], learning_rate=_RATE / i, weight_decay=0.0
                )
                for i in range(1, num_groups)
            ]
            optimizer = gpuopt.AdamWOptimizer(_DECAY * _RATE, _RATE, groups=groups)
            pairs = list(zip(gradients, variables, strict=True))
            contenders[name] = _make_our_step(partial(optimizer.apply_gradients, pairs), compiled)
    return Workload(
        "host_groups",
        f"AdamW with {_GROUPS} parameter groups on the 161 tensors of a ResNet-50",
        sum(gradient.nbytes for gradient in gradients) * 7,
        contenders,
    )


def _make_row_wise_workload(name: str, what: str, shapes: Shapes) -> Workload:
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
    contenders: dict[str, Step] = {}
    for title, optimizer in (
        ("gpuopt", gpuopt.RowWiseAdagradOptimizer(_RATE)),
        ("Adagrad", gpuopt.AdagradOptimizer(_RATE)),
    ):
        variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
        step = partial(optimizer.apply_gradients, list(zip(gradients, variables, strict=True)))
        contenders[title] = _make_our_step(step, True)
        alone = NUMPY_ALONE if title == "gpuopt" else f"{title}, numpy alone"
        contenders[alone] = _make_our_step(step, False)
    # A step reads and writes the weights, and reads the gradient.
    num_bytes = 3 * sum(gradient.nbytes for gradient in gradients)
    return Workload(name, f"Row-wise Adagrad on {what}", num_bytes, contenders)


def _make_our_step(step: Step, compiled: bool) -> Step:
    def run() -> None:
        os.environ["GPUOPT_COMPILED"] = "1" if compiled else "0"
        step()

    return run


def _make_formula_step(job: _Job, gradients: Sequence[np.ndarray]) -> Step:
    """Makes a step that is the paper's formula in plain numpy."""
    states = [(np.ones_like(g), *[np.zeros_like(g)] * job.slots) for g in gradients]

    def step() -> None:
        states[:] = [
            job.formula(state[0], g, *state[1:]) for state, g in zip(states, gradients, strict=True)
        ]

    return step


def _make_torch_step(make: Callable[..., Any], form: Any, gradients: Sequence[np.ndarray]) -> Step:
    import torch

    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.ones(gradient.shape))
        parameter.grad = torch.from_numpy(gradient)
        parameters.append(parameter)
    optimizer = make(torch, parameters, form)
    return lambda: optimizer.step()


def _make_torch_sparse_step(make: Callable[..., Any], dense: bool = False) -> Step:
    import torch

    rows, values = draw_lookups()
    parameter = torch.nn.Parameter(torch.ones(TABLE))
    optimizer = make(torch, [parameter])
    indices, given = torch.from_numpy(rows)[None], torch.from_numpy(values)

    def step() -> None:
        # A new tensor in each step: torch marks a tensor whose rows are summed, and skips the work.
        gradient = torch.sparse_coo_tensor(indices, given, TABLE, check_invariants=False)
        parameter.grad = gradient.to_dense() if dense else gradient
        optimizer.step()

    return step


def _torch_sparse_adam(torch: Any, parameters: Any) -> Any:
    return torch.optim.SparseAdam(parameters, lr=_RATE)


def _torch_sparse_adagrad(torch: Any, parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, lr=_RATE)


def _make_our_sparse_steps(make: Callable[[float], gpuopt.Optimizer]) -> dict[str, Step]:
    rows, values = draw_lookups()
    slices = gpuopt.IndexedSlices(values, rows)
    contenders = {}
    for title, compiled in (("gpuopt", True), (NUMPY_ALONE, False)):
        table = gpuopt.Variable(np.ones(TABLE, np.float32))
        contenders[title] = _make_our_step(
            partial(make(_RATE).apply_gradients, [(slices, table)]), compiled
        )
    return contenders


def _make_sparse_workload(
    name: str,
    title: str,
    make: Callable[[float], gpuopt.Optimizer],
    make_torch: Callable[..., Any],
    slots: int,
) -> Workload:
    contenders = _make_our_sparse_steps(make)
    if find_spec("torch") is not None:
        contenders[f"torch {make_torch.__name__.removeprefix('_torch_')}"] = (
            _make_torch_sparse_step(make_torch)
        )
        if make_torch is not _torch_sparse_adam:
            contenders["torch sparse_adam"] = _make_torch_sparse_step(_torch_sparse_adam)
    rows, values = draw_lookups()
    touched = np.unique(rows).size * TABLE[1] * 4
    return Workload(
        f"host_sparse_{name}",
        f"{title} on {LOOKUPS:,} rows of a table of {TABLE[0]:,} x {TABLE[1]}",
        values.nbytes + rows.nbytes + touched * 2 * (1 + slots),
        contenders,
    )


def _make_all_rows_workload() -> Workload:
    contenders = _make_our_sparse_steps(gpuopt.AdamOptimizer)
    if find_spec("torch") is not None:
        contenders["torch to_dense, fused"] = _make_torch_sparse_step(
            lambda torch, parameters: torch.optim.Adam(parameters, lr=_RATE, fused=True), dense=True
        )
    return Workload(
        "host_all_rows_adam",
        f"TensorFlow's Adam, which updates all rows, for {LOOKUPS:,} rows of "
        f"{TABLE[0]:,} x {TABLE[1]}",
        TABLE[0] * TABLE[1] * 4 * 6,
        contenders,
    )


def _make_row_sums_workload() -> Workload:
    rows, values = draw_lookups()
    backend = backend_for(Device.cpu)
    contenders: dict[str, Step] = {"gpuopt": lambda: backend.sum_duplicate_rows(values, rows)}
    if find_spec("torch") is not None:
        import torch

        indices, given = torch.from_numpy(rows)[None], torch.from_numpy(values)
        contenders["torch coalesce"] = lambda: torch.sparse_coo_tensor(
            indices, given, TABLE, check_invariants=False
        ).coalesce()

    def added_at() -> np.ndarray:
        unique, inverse = np.unique(rows, return_inverse=True)
        sums = np.zeros((unique.size, values.shape[1]), values.dtype)
        np.add.at(sums, inverse, values)
        return sums

    contenders["numpy add.at"] = added_at
    return Workload(
        "host_row_sums",
        f"Sums of repeated rows among {LOOKUPS:,} of {TABLE[1]} elements",
        values.nbytes + np.unique(rows).size * TABLE[1] * 4,
        contenders,
    )
