"""What `gpuopt bench` times: updates of models, and what takes part in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gpuopt
from gpuopt.backends.cpu.compiler import compiler
from gpuopt.bench.contenders import (
    Contender,
    StepMaker,
    make_elementwise_dense_step,
    make_naive_dense_step,
    make_naive_sparse_step,
    make_our_dense_step,
    make_our_sparse_step,
    make_users_step,
)
from gpuopt.bench.jobs import JOBS, RATE, Job, Place
from gpuopt.bench.models import (
    Shapes,
    draw_lookups,
    list_dlrm_tables,
    list_gpt2_shapes,
    list_llama_layer_shapes,
    list_resnet50_shapes,
)
from gpuopt.bench.peers import (
    TORCH_FORMS,
    find_jax_device,
    make_optax_step,
    make_thinc_step,
    make_torch_dense_step,
    make_torch_sparse_step,
    why_not_optax,
    why_not_thinc,
    why_not_torch,
)

DTYPES: Mapping[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# The contender that is gpuopt without compiled rules.
NUMPY_ALONE = "gpuopt, numpy alone"
_NOT_COMPILED = "that is gpuopt, as no C++ compiler was found"
ARRAYS = "array operations"
# With more tensors than this, array operations on a GPU take a second for each step.
_MOST_NAIVE = 1000
# Of each type, the arrays that contenders have at most beside weights and slots.
_MOST_CONTENDERS, _GRADIENTS, _TEMPORARIES = 7, 3, 3
# What has sparse gradients: Adam stands for LazyAdam.
_SPARSE_JOBS = ("adam", "adagrad")


@dataclass(frozen=True)
class Task:
    """What a step updates.

    Attributes:
        name: As in "gpt2-124m".
        description: In a few words.
        shapes: Of the variables. With lookups, they are tables: (height, width).
        lookups: How many rows the gradient of each table names; 0 if gradients are dense.
        per: What the time of a step is divided by, where its growth matters: "parameter",
            "tensor" or "row".
        curve: What grows along with others of this name, as in "parameters"; or None.
        at: How much of it there is.
    """

    name: str
    description: str
    shapes: Shapes
    lookups: int = 0
    per: str | None = None
    curve: str | None = None
    at: int | None = None

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def units(self) -> int | None:
        """How many of `per` a step has."""
        match self.per:
            case "parameter":
                return self.num_parameters
            case "tensor":
                return len(self.shapes)
            case "row":
                return self.lookups * len(self.shapes)
        return None


class Made(NamedTuple):
    """A task's contenders.

    Attributes:
        bytes_moved: How many bytes a step must at least read and write.
        contenders: By name; gpuopt's is "gpuopt".
        left_out: Those that take no part, with reasons.
    """

    bytes_moved: int
    contenders: dict[str, Contender]
    left_out: dict[str, str]


def list_tasks() -> Iterator[Task]:
    """Yields the tasks that are named after models."""
    yield Task("resnet-50", "the 161 tensors of a ResNet-50", list(list_resnet50_shapes()))
    yield Task("gpt2-124m", "the 148 tensors of GPT-2 124M", list(list_gpt2_shapes()))
    yield Task("llama-layer", "a layer of Llama 2 7B", list(list_llama_layer_shapes()))
    tables = list_dlrm_tables()
    yield Task("dlrm", "DLRM's 26 tables, 2,048 rows of each by Zipf's law", tables, 2048)
    yield Task("1000-tensors", "1,000 tensors of 1,024 elements each", [(1024,)] * 1000)
    yield Task("10000-tensors", "10,000 tensors of 64 elements each", [(64,)] * 10_000)
    yield Task("16m", "one tensor of 16,777,216 elements", [(2**24,)])
    yield Task("160m", "one tensor of 160,000,000 elements", [(160_000_000,)])


def list_growing_tasks() -> Iterator[Task]:
    """Yields the tasks whose sizes grow in one respect, and leave the others alone."""
    for exponent in range(10, 28):
        yield Task(
            f"parameters-2^{exponent}",
            f"one tensor of 2^{exponent} elements",
            [(2**exponent,)],
            per="parameter",
            curve="parameters",
            at=2**exponent,
        )
    for count in (1, 10, 100, 1000, 10_000):
        yield Task(
            f"tensors-{count}",
            f"{count:,} tensors of 256 elements",
            [(256,)] * count,
            per="tensor",
            curve="tensors",
            at=count,
        )
    for exponent in range(7):
        yield Task(
            f"rows-10^{exponent}",
            f"10^{exponent} rows by Zipf's law of a table of 1,000,000 x 16",
            [(10**6, 16)],
            10**exponent,
            "row",
            "rows",
            10**exponent,
        )
    for exponent in range(3, 8):
        yield Task(
            f"height-10^{exponent}",
            f"8,192 rows by Zipf's law of a table of 10^{exponent} x 16",
            [(10**exponent, 16)],
            8192,
            "row",
            "height",
            10**exponent,
        )


def why_not(
    task: Task, job_name: str, dtype: str, free_bytes: int | None, num_users: int = 0
) -> str | None:
    """Returns why a task cannot be run, or None.

    Args:
        task: The task.
        job_name: The optimizer, among `JOBS`.
        dtype: Of the variables.
        free_bytes: How much memory there is; None if unknown.
        num_users: How many of a user's own contenders take part.
    """
    if task.lookups and job_name not in _SPARSE_JOBS:
        return f"gradients are sparse, and only {' and '.join(_SPARSE_JOBS)} have contenders"
    if task.lookups and dtype != "float32":
        return "gradients are sparse, and contenders have them in float32"
    contenders = _MOST_CONTENDERS + num_users
    each = contenders * (1 + len(JOBS[job_name].state)) + _GRADIENTS + _TEMPORARIES
    needed = task.num_parameters * itemsize(dtype) * each
    if free_bytes is not None and needed > free_bytes:
        return f"it needs {needed / 1e9:.1f} GB of memory, and {free_bytes / 1e9:.1f} are free"
    return None


def make_contenders(
    task: Task,
    job_name: str,
    dtype: str,
    place: Place,
    users: Sequence[tuple[str, StepMaker]] = (),
) -> Made:
    """Makes everything that can do a task here.

    Args:
        task: The task, for which `why_not` has no reason.
        job_name: The optimizer, among `JOBS`.
        dtype: Of the variables.
        place: Where they are.
        users: A user's own contenders: their names, and what makes their steps.

    Raises:
        TypeError: a user's contender makes no step.
    """
    job = JOBS[job_name]
    if task.lookups:
        return _make_sparse(task, job_name, place, users)
    xp, kind = place.xp, np.dtype(DTYPES[dtype])
    gradients = [[_make_gradient(xp, shape, kind) for shape in task.shapes]]

    def weights() -> list[Any]:
        return [xp.ones(shape, dtype=kind) for shape in task.shapes]

    contenders = {"gpuopt": make_our_dense_step(job, weights(), gradients)}
    left_out: dict[str, str] = {}
    if place.torch_device == "cpu" and compiler():
        contenders[NUMPY_ALONE] = make_our_dense_step(job, weights(), gradients, compiled=False)
    elif place.torch_device == "cpu":
        left_out[NUMPY_ALONE] = _NOT_COMPILED
    for title, form in TORCH_FORMS.items():
        if (reason := why_not_torch(job, place, form, dtype)) is None:
            contenders[title] = make_torch_dense_step(job, weights(), gradients, form)
        else:
            left_out[title] = reason
    others = {"optax jit": why_not_optax(dtype, place), "Thinc": why_not_thinc(job_name, dtype)}
    makers: Mapping[str, Any] = {
        "optax jit": lambda: make_optax_step(
            job.optax, weights(), gradients, find_jax_device(place)
        ),
        "Thinc": lambda: make_thinc_step(weights(), gradients),
    }
    for title, reason in others.items():
        if reason is None:
            contenders[title] = makers[title]()
        else:
            left_out[title] = reason
    if hasattr(xp, "ElementwiseKernel") and dtype in ("float32", "float64"):
        contenders["a kernel for each parameter"] = make_elementwise_dense_step(
            job, xp, weights(), gradients
        )
    if dtype == "float16" and "v" in job.state:
        left_out[ARRAYS] = "in float16, Adam's epsilon is 0, and so its steps are infinite"
    elif place.torch_device == "cpu" or len(task.shapes) <= _MOST_NAIVE:
        contenders[ARRAYS] = make_naive_dense_step(job, xp, weights(), gradients)
    else:
        left_out[ARRAYS] = "it would launch a hundred thousand kernels in each step"
    for name, make in users:
        contenders[name] = make_users_step(name, make, weights(), gradients[0])
    # A step reads and writes the weight and the state, and reads the gradient.
    moved = task.num_parameters * itemsize(dtype) * (3 + 2 * len(job.state))
    return Made(moved, contenders, left_out)


def _make_sparse(
    task: Task, job_name: str, place: Place, users: Sequence[tuple[str, StepMaker]]
) -> Made:
    xp, job = place.xp, JOBS[job_name]
    drawn = [draw_lookups((height, width), task.lookups) for height, width in task.shapes]
    lookups = [(xp.asarray(values), xp.asarray(rows)) for rows, values in drawn]

    def tables() -> list[Any]:
        return [xp.ones(shape, dtype=np.float32) for shape in task.shapes]

    kind = gpuopt.LazyAdamOptimizer if job_name == "adam" else gpuopt.AdagradOptimizer
    ours: Callable[[], gpuopt.Optimizer] = partial(kind, RATE)
    contenders = {"gpuopt": make_our_sparse_step(ours, tables(), lookups)}
    left_out = dict.fromkeys(("optax jit", "Thinc"), "it has no sparse gradients")
    if place.torch_device == "cpu" and compiler():
        contenders[NUMPY_ALONE] = make_our_sparse_step(ours, tables(), lookups, compiled=False)
    elif place.torch_device == "cpu":
        left_out[NUMPY_ALONE] = _NOT_COMPILED
    if (reason := why_not_torch(job, place, {})) is None:
        contenders["torch sparse"] = make_torch_sparse_step(
            partial(_make_torch_sparse, job_name, job), tables(), lookups
        )
    else:
        left_out["torch sparse"] = reason
    contenders[ARRAYS] = make_naive_sparse_step(job, xp, tables(), lookups)
    slices = [gpuopt.IndexedSlices(values, rows) for values, rows in lookups]
    for name, make in users:
        contenders[name] = make_users_step(name, make, tables(), slices)
    arrays = 2 * (1 + len(job.state))
    moved = sum(
        values.nbytes + rows.nbytes + arrays * np.unique(rows).size * values[0].nbytes
        for rows, values in drawn
    )
    return Made(moved, contenders, left_out)


def _make_torch_sparse(job_name: str, job: Job, torch: Any, parameters: Any) -> Any:
    if job_name == "adam":
        return torch.optim.SparseAdam(parameters, RATE)
    return job.torch(torch, parameters, {})


def itemsize(dtype: str) -> int:
    """Returns how many bytes an element of this type has."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


def _make_gradient(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    noise = np.random.default_rng(0).standard_normal(min(2**20, math.prod(shape)), np.float32)
    return xp.asarray(np.resize(noise, shape).astype(dtype))
