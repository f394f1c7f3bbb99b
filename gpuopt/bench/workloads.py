"""What `gpuopt bench` times: updates of models, and what takes part in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    make_elementwise_step,
    make_naive_step,
    make_our_step,
    make_users_step,
)
from gpuopt.bench.jobs import JOBS, LAZY_ADAM, Job, Place
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
    make_torch_step,
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
_NO_SPARSE_GRADIENTS = "it has no sparse gradients"


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
        gradient_sets: How many sets of dense gradients the steps use in turn.
    """

    name: str
    description: str
    shapes: Shapes
    lookups: int = 0
    per: str | None = None
    curve: str | None = None
    at: int | None = None
    gradient_sets: int = 1

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
        ContenderError: a user's contender makes no step.
    """
    return _make_all(*_list_candidates(task, JOBS[job_name], dtype, place, users))


def make_chosen(task: Task, job: Job, place: Place, names: Collection[str]) -> Made:
    """Makes the contenders of some names, in float32; the others are not looked for."""
    bytes_moved, candidates = _list_candidates(task, job, "float32", place, ())
    return _make_all(bytes_moved, [each for each in candidates if each.name in names])


class _Candidate(NamedTuple):
    """A contender that may be made.

    Attributes:
        name: Its name.
        make: Makes it.
        why_not: Returns why it takes no part, or None.
    """

    name: str
    make: Callable[[], Contender]
    why_not: Callable[[], str | None] = lambda: None


def _make_all(bytes_moved: int, candidates: Sequence[_Candidate]) -> Made:
    made = Made(bytes_moved, {}, {})
    for name, make, why_not in candidates:
        if (reason := why_not()) is None:
            made.contenders[name] = make()
        else:
            made.left_out[name] = reason
    return made


def _list_candidates(
    task: Task, job: Job, dtype: str, place: Place, users: Sequence[tuple[str, StepMaker]]
) -> tuple[int, list[_Candidate]]:
    """Returns how many bytes a step moves at least, and what may do it."""
    xp, kind = place.xp, np.dtype(DTYPES[dtype])
    if task.lookups and job.title == "Adam":
        job = LAZY_ADAM
    drawn = _draw_lookups(task) if task.lookups else None
    gradients = [
        [_make_gradient(xp, shape, kind) for shape in task.shapes]
        if drawn is None
        # Arrays of their own: else a cache would have the gradients of equal tables but the first.
        else [
            gpuopt.IndexedSlices(xp.asarray(values.copy()), xp.asarray(rows.copy()))
            for rows, values in drawn
        ]
        for _ in range(task.gradient_sets)
    ]

    def weights() -> list[Any]:
        return [xp.ones(shape, dtype=kind) for shape in task.shapes]

    def ours(compiled: bool = True) -> Contender:
        return make_our_step(job.ours, weights(), gradients, compiled)

    def torchs(form: Mapping[str, bool]) -> Contender:
        return make_torch_step(partial(job.torch, form=form), weights(), gradients)

    def users_own(name: str, make: StepMaker) -> Contender:
        return make_users_step(name, make, weights(), gradients[0])

    def optaxs() -> Contender:
        return make_optax_step(job.optax, weights(), gradients, find_jax_device(place))

    def thincs() -> Contender:
        return make_thinc_step(weights(), gradients)

    def alone() -> str | None:
        return None if compiler() else _NOT_COMPILED

    def no_rows() -> str | None:
        return _NO_SPARSE_GRADIENTS if task.lookups else None

    # torch has SparseAdam wherever it has Adam.
    of_torch = JOBS["adam"] if task.lookups else job
    forms = {"torch sparse": {}} if task.lookups else TORCH_FORMS
    candidates = [
        _Candidate("gpuopt", ours),
        *([_Candidate(NUMPY_ALONE, partial(ours, False), alone)] if place.on_host else []),
        *(
            _Candidate(
                title, partial(torchs, form), partial(why_not_torch, of_torch, place, form, dtype)
            )
            for title, form in forms.items()
        ),
        _Candidate("optax jit", optaxs, lambda: no_rows() or why_not_optax(dtype, place)),
        _Candidate("Thinc", thincs, lambda: no_rows() or why_not_thinc(job, dtype)),
    ]
    if hasattr(xp, "ElementwiseKernel") and dtype in ("float32", "float64") and not task.lookups:
        candidates.append(
            _Candidate(
                "a kernel for each parameter",
                lambda: make_elementwise_step(job, xp, weights(), gradients),
            )
        )
    candidates.append(
        _Candidate(
            ARRAYS,
            lambda: make_naive_step(job, xp, weights(), gradients),
            lambda: _why_not_arrays(task, job, dtype, place),
        )
    )
    candidates += [_Candidate(name, partial(users_own, name, make)) for name, make in users]
    # A step reads and writes the weight and the state, and reads the gradient; of tables, only the
    # rows that have one.
    arrays = 2 * (1 + len(job.state))
    if drawn is None:
        return task.num_parameters * itemsize(dtype) * (1 + arrays), candidates
    moved = sum(
        values.nbytes + rows.nbytes + arrays * np.unique(rows).size * values[0].nbytes
        for rows, values in drawn
    )
    return moved, candidates


def _why_not_arrays(task: Task, job: Job, dtype: str, place: Place) -> str | None:
    if dtype == "float16" and "v" in job.state:
        return "in float16, Adam's epsilon is 0, and so its steps are infinite"
    if not (place.on_host or task.lookups) and len(task.shapes) > _MOST_NAIVE:
        return "it would launch a hundred thousand kernels in each step"
    return None


def _draw_lookups(task: Task) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (rows, values) for each table."""
    drawn = {
        (height, width): draw_lookups((height, width), task.lookups)
        for height, width in set(task.shapes)
    }
    return [drawn[height, width] for height, width in task.shapes]


def itemsize(dtype: str) -> int:
    """Returns how many bytes an element of this type has."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


def _make_gradient(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    noise = np.random.default_rng(0).standard_normal(min(2**20, math.prod(shape)), np.float32)
    return xp.asarray(np.resize(noise, shape).astype(dtype))
