"""All workloads: of `python -m bench` in host memory, and of `python -m bench.gpu`.

Models, optimizers and most contenders are those of `gpuopt bench`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec

import numpy as np

import gpuopt
from bench import (
    autodiff,
    catch_up,
    checkpoints,
    first_step,
    low_precision,
    missed_steps,
    options,
    step_path,
)
from bench.harness import Offer
from bench.targets import Target, list_targets
from gpuopt.backends import backend_for
from gpuopt.bench.clock import Step
from gpuopt.bench.contenders import compiled_as_now, make_our_step
from gpuopt.bench.jobs import JOBS, RATE, Place
from gpuopt.bench.models import LOOKUPS, TABLE, draw_lookups
from gpuopt.bench.peers import ARRAYS, NUMPY_ALONE, TORCH_FORMS
from gpuopt.bench.sampling import rest
from gpuopt.bench.workloads import Task, Workload, list_tasks, make_chosen, why_not
from gpuopt.device import Device

_HOST = Place(np, "cpu")
_MODELS = {task.name: task for task in list_tasks()}


def offer_host_workloads(pattern: str = "*") -> Iterator[Offer]:
    """Yields the workloads in host memory whose names match the pattern; for "*", no slow ones."""
    for offer in HOST_OFFERS:
        if fnmatch(offer.name, pattern) and not (offer.is_slow and pattern == "*"):
            yield offer


def _make(job_name: str, task: Task, place: Place, names: Collection[str]) -> Workload:
    """Makes a task's contenders of some names."""
    job = JOBS[job_name]
    title = "LazyAdam" if task.lookups and job_name == "adam" else job.title
    # On a GPU, each kernel that is launched costs.
    counts = not (place.on_host or task.lookups)
    return replace(
        make_chosen(task, job, place, names),
        description=f"{title} on {task.description}",
        per="operation" if counts else None,
        units=len(task.shapes) if counts else None,
        settle=rest if place.on_host else lambda: None,
    )


# Optimizers beside those of other libraries, on models

_SIZES = {
    "16m": _MODELS["16m"],
    "resnet50": _MODELS["resnet-50"],
    "1000x64": Task("1000x64", "1,000 tensors of 64 elements each", [(64,)] * 1000),
}
_LARGE = ("16m", "resnet50")
_CONTENDERS = ("gpuopt", NUMPY_ALONE, *TORCH_FORMS, "optax jit", ARRAYS)
# The largest ratios to torch fused, and to torch foreach of what torch does not fuse: of compiled
# rules, and of numpy alone.
_LARGE_RATIOS = {"momentum": 1.05, "adagrad": 1.05, "adam": 1.05, "adam_w": 1.1}
_LARGE_NUMPY_RATIOS = {"momentum": 1.3, "adagrad": 1.8, "adam": 2.2, "rms_prop": 0.5}
_SMALL_NUMPY_RATIOS = {"momentum": 0.35, "adam": 0.2}


def _offer_models() -> Iterator[Offer]:
    for job_name in JOBS:
        peer = "torch foreach" if job_name == "rms_prop" else "torch fused"
        for size, task in _SIZES.items():
            ratios = _LARGE_RATIOS if size in _LARGE else {}
            numpy_ratios = _LARGE_NUMPY_RATIOS if size in _LARGE else _SMALL_NUMPY_RATIOS
            name = f"host_{job_name}_{size}"
            limits = (
                {peer: of[job_name]} if job_name in of else {} for of in (ratios, numpy_ratios)
            )
            make = partial(_make, job_name, task, _HOST, _CONTENDERS)
            yield Offer(name, make, list_targets(name, *limits))


# Two arrays of ten: what a first trial measures.
_BY_HAND = "numpy by hand"
# The last ones are compiled.
_SMALL_STEPS = 1001
# As in a loop of training, what a step reads is in the caches.
_AT_ONCE = 100


def _offer_small() -> Iterator[Offer]:
    name = "host_adam_2x10"
    make = partial(_make_small, "Adam", gpuopt.AdamOptimizer, _adam_by_hand)
    yield Offer(name, make, list_targets(name, {_BY_HAND: 2.2}, {_BY_HAND: 3.5}))
    name = "host_sgd_2x10"
    make = partial(_make_small, "SGD", gpuopt.GradientDescentOptimizer, _sgd_by_hand)
    yield Offer(name, make, list_targets(name, {_BY_HAND: 6.0}))


def _make_small(
    title: str,
    ours: Callable[[float], gpuopt.Optimizer],
    by_hand: Callable[[list[np.ndarray], list[np.ndarray]], Step],
) -> Workload:
    def weights() -> list[np.ndarray]:
        return [np.ones(10, np.float32) for _ in range(2)]

    gradients = [np.full(10, 0.1, np.float32) for _ in range(2)]
    contenders: dict[str, Step] = {_BY_HAND: partial(_repeat, by_hand(weights(), gradients))}
    with compiled_as_now():
        for name, compiled in (("gpuopt", True), (NUMPY_ALONE, False)):
            made = make_our_step(partial(ours, RATE), weights(), [gradients], compiled)
            made.prepare()
            _repeat(made.step, _SMALL_STEPS)
            contenders[name] = replace(made, step=partial(_repeat, made.step))
    what = f"{_AT_ONCE} steps of {title} on two arrays of ten"
    return Workload(what, contenders, None, settle=rest)


def _repeat(step: Step, times: int = _AT_ONCE) -> None:
    for _ in range(times):
        step()


def _adam_by_hand(weights: list[np.ndarray], gradients: list[np.ndarray]) -> Step:
    means, squares = ([np.zeros_like(w) for w in weights] for _ in range(2))
    steps = itertools.count(1)

    def step() -> None:
        t = next(steps)
        rate = RATE * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        for w, g, m, v in zip(weights, gradients, means, squares, strict=True):
            m *= 0.9
            m += 0.1 * g
            v *= 0.999
            v += 0.001 * g * g
            w -= rate * m / (np.sqrt(v) + 1e-8)

    return step


def _sgd_by_hand(weights: list[np.ndarray], gradients: list[np.ndarray]) -> Step:
    def step() -> None:
        for w, g in zip(weights, gradients, strict=True):
            w -= RATE * g

    return step


_ROWS_OF_TABLE = f"{LOOKUPS:,} rows of a table of {TABLE[0]:,} x {TABLE[1]}"
_TABLE_TASK = Task("table", _ROWS_OF_TABLE, [TABLE], LOOKUPS)
_SPARSE_RATIOS = {"adam": 0.8, "adagrad": 0.9}


def _offer_tables() -> Iterator[Offer]:
    for job_name, title in (("adam", "lazy_adam"), ("adagrad", "adagrad")):
        name = f"host_sparse_{title}"
        limits = {"torch sparse_adam": 0.5}, {f"torch sparse_{job_name}": _SPARSE_RATIOS[job_name]}
        yield Offer(name, partial(_make_sparse, job_name), list_targets(name, *limits))
    name = "host_all_rows_adam"
    yield Offer(name, _make_all_rows, list_targets(name, {}, {"torch to_dense, fused": 1.2}))
    name = "host_row_sums"
    yield Offer(name, _make_row_sums, list_targets(name, {"torch coalesce": 1.0}))


def _make_sparse(job_name: str) -> Workload:
    workload = _make(job_name, _TABLE_TASK, _HOST, ("gpuopt", NUMPY_ALONE))
    contenders = dict(workload.contenders)
    for peer in dict.fromkeys((job_name, "adam")):
        found = make_chosen(_TABLE_TASK, JOBS[peer], _HOST, ("torch sparse",)).contenders
        contenders |= {f"torch sparse_{peer}": each for each in found.values()}
    return replace(workload, contenders=contenders)


def _make_all_rows() -> Workload:
    rows, values = draw_lookups()
    gradients = [[gpuopt.IndexedSlices(values, rows)]]
    contenders: dict[str, Step] = {
        name: make_our_step(JOBS["adam"].ours, [np.ones(TABLE, np.float32)], gradients, compiled)
        for name, compiled in (("gpuopt", True), (NUMPY_ALONE, False))
    }
    if find_spec("torch") is not None:
        import torch

        parameter = torch.nn.Parameter(torch.ones(TABLE))
        optimizer = torch.optim.Adam([parameter], lr=RATE, fused=True)
        given = torch.from_numpy(rows)[None], torch.from_numpy(values), TABLE

        def step() -> None:
            # A new tensor in each step: torch marks one whose rows are summed, and skips the work.
            gradient = torch.sparse_coo_tensor(*given, check_invariants=False)
            parameter.grad = gradient.to_dense()
            optimizer.step()

        contenders["torch to_dense, fused"] = step
    what = f"TensorFlow's Adam, which updates all rows, for {_ROWS_OF_TABLE}"
    return Workload(what, contenders, TABLE[0] * TABLE[1] * 4 * 6, settle=rest)


def _make_row_sums() -> Workload:
    rows, values = draw_lookups()
    backend = backend_for(Device.cpu)
    contenders: dict[str, Step] = {"gpuopt": lambda: backend.sum_duplicate_rows(values, rows)}
    if find_spec("torch") is not None:
        import torch

        given = torch.from_numpy(rows)[None], torch.from_numpy(values), TABLE
        contenders["torch coalesce"] = lambda: torch.sparse_coo_tensor(
            *given, check_invariants=False
        ).coalesce()

    def added_at() -> np.ndarray:
        unique, inverse = np.unique(rows, return_inverse=True)
        sums = np.zeros((unique.size, values.shape[1]), values.dtype)
        np.add.at(sums, inverse, values)
        return sums

    contenders["numpy add.at"] = added_at
    what = f"Sums of repeated rows among {LOOKUPS:,} of {TABLE[1]} elements"
    moved = values.nbytes + np.unique(rows).size * TABLE[1] * 4
    return Workload(what, contenders, moved, settle=rest)


HOST_OFFERS = (
    *checkpoints.OFFERS,
    *low_precision.OFFERS,
    *autodiff.OFFERS,
    *step_path.OFFERS,
    *catch_up.OFFERS,
    *missed_steps.OFFERS,
    *first_step.OFFERS,
    *options.OFFERS,
    *_offer_models(),
    *_offer_small(),
    *_offer_tables(),
)
# Those of a CPU.
TARGETS = tuple(target for offer in HOST_OFFERS for target in offer.targets)


# On a GPU

# Times alone are for this one.
GPU = "NVIDIA H200"
_LARGE_ON_GPU = [f"gpu_{job}_160m" for job in ("adam", "momentum", "adagrad")]
_SPARSE = ["gpu_sparse_adagrad", "gpu_sparse_lazyadam"]
_TEN_TABLES = "gpu_sparse_lazyadam_10_tables"
GPU_TARGETS = (
    *(Target(name, "device.ratio", "torch fused", at_most=1.0) for name in _LARGE_ON_GPU),
    *(Target(name, "device.share_of_copy", at_least=0.9) for name in _LARGE_ON_GPU),
    Target("gpu_adam_gpt2", "device.ratio", "torch fused", at_most=1.03),
    Target("gpu_adam_resnet50", "wall.ratio", "torch fused", at_most=0.8),
    Target("gpu_adam_10000x64_same", "wall.median_ms", at_most=2.0),
    Target("gpu_adam_10000x64_fresh", "wall.median_ms", at_most=6.0),
    Target("gpu_adam_1000x1024_same", "wall.median_ms", at_most=0.2),
    Target("gpu_adam_1000x1024_fresh", "wall.median_ms", at_most=0.6),
    *(Target(name, "device.ratio", "torch sparse", at_most=0.2) for name in _SPARSE),
    *(Target(name, "wall.ratio", "torch sparse", at_most=0.2) for name in _SPARSE),
    *(Target(name, "device.share_of_copy", at_least=0.3) for name in _SPARSE),
    # FBGEMM's backward pass and its Adam of such tables took 1.005 ms on an H100: 48% of what its
    # memory can move (recsys-examples, dynamicemb/benchmark/benchmark_results.json). Here the
    # backward pass has been made: the gradient's rows are given.
    Target(_TEN_TABLES, "device.share_of_copy", at_least=0.5),
    *(Target(name, "runs_ahead", at_least=1) for name in (*_SPARSE, _TEN_TABLES)),
)
_GPU_CONTENDERS = ("gpuopt", *TORCH_FORMS, "torch sparse", "a kernel for each parameter", ARRAYS)
_TALL_TABLE = Task("", "65,536 rows of a table of 10,000,000 x 128", [(10**7, 128)], 65_536)
_TALL_TABLES = Task(
    "",
    "105,000 rows by Zipf's law of each of 10 tables of 1,680,000 x 128",
    [(1_680_000, 128)] * 10,
    105_000,
)


def _with_sets(model: str, gradient_sets: int) -> Task:
    """Returns a model whose steps use so many sets of gradient arrays in turn."""
    arrays = "the same arrays" if gradient_sets == 1 else "other arrays"
    task = _MODELS[model]
    described = f"{task.description}, gradients in {arrays}"
    return replace(task, description=described, gradient_sets=gradient_sets)


# By workload: an optimizer, and what it updates.
_GPU_TASKS = {
    **{f"gpu_{job}_160m": (job, _MODELS["160m"]) for job in ("adam", "momentum", "adagrad")},
    "gpu_adam_gpt2": ("adam", _MODELS["gpt2-124m"]),
    "gpu_adam_resnet50": ("adam", _MODELS["resnet-50"]),
    "gpu_momentum_resnet50": ("momentum", _MODELS["resnet-50"]),
    "gpu_sparse_adagrad": ("adagrad", _TALL_TABLE),
    "gpu_sparse_lazyadam": ("adam", _TALL_TABLE),
    _TEN_TABLES: ("adam", _TALL_TABLES),
    "gpu_adam_1000x1024_same": ("adam", _with_sets("1000-tensors", 1)),
    "gpu_adam_1000x1024_fresh": ("adam", _with_sets("1000-tensors", 3)),
    "gpu_adam_10000x64_same": ("adam", _with_sets("10000-tensors", 1)),
    "gpu_adam_10000x64_fresh": ("adam", _with_sets("10000-tensors", 3)),
}


def offer_gpu_workloads(
    place: Place, pattern: str = "*", resize: Callable[[Task], Task] = lambda task: task
) -> Iterator[Offer]:
    """Yields the workloads on a GPU whose names match the pattern; tests make their tasks small."""
    for name, (job_name, of_full_size) in _GPU_TASKS.items():
        if fnmatch(name, pattern):
            task = resize(of_full_size)
            make = partial(_make, job_name, task, place, _GPU_CONTENDERS)
            targets = [each for each in GPU_TARGETS if each.workload == name]
            yield Offer(name, make, targets, partial(why_not, task, job_name, "float32"))
