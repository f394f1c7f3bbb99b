"""What `gpuopt bench` times: updates of models, and what takes part in them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import ml_dtypes
import numpy as np

import gpuopt
from gpuopt.bench.clock import Step
from gpuopt.bench.contenders import Setting, StepMaker
from gpuopt.bench.jobs import JOBS, LAZY_ADAM, Job, Place
from gpuopt.bench.models import (
    Shapes,
    draw_lookups,
    list_dlrm_tables,
    list_gpt2_shapes,
    list_llama_layer_shapes,
    list_resnet50_shapes,
)
from gpuopt.bench.peers import PEERS, Peer, users_peer
from gpuopt.bench.results import Copies, Figures, Run

DTYPES: Mapping[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
# How many contenders of dense and of sparse gradients have weights and slots of their own, at most.
_MOST_DENSE, _MOST_SPARSE = 7, 4
# Where gradients are dense: other libraries' own, and temporary arrays.
_THEIR_GRADIENTS, _TEMPORARIES = 2, 3
# What has sparse gradients: Adam stands for LazyAdam.
_SPARSE_JOBS = ("adam", "adagrad")
# (rows, values) for each table.
_Drawn = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Task:
    """What a step updates.

    Attributes:
        name: As in "gpt2-124m".
        description: In a few words.
        shapes: Of the variables. With lookups, they are tables: (height, width).
        lookups: How many rows the gradient of each table names; 0 if gradients are dense.
        curve: What grows along with other tasks: "parameters", "tensors", "rows" or "height"; None
            if nothing does.
        gradient_sets: How many sets of dense gradients the steps use in turn.
    """

    name: str
    description: str
    shapes: Shapes
    lookups: int = 0
    curve: str | None = None
    gradient_sets: int = 1

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def at(self) -> int | None:
        """How much there is of what grows."""
        match self.curve:
            case "parameters":
                return self.num_parameters
            case "tensors":
                return len(self.shapes)
            case "rows":
                return self.lookups
            case "height":
                return self.shapes[0][0]
        return None

    @property
    def per(self) -> str | None:
        """What the time of a step is divided by, where something grows."""
        growing = {"parameters": "parameter", "tensors": "tensor", "rows": "row", "height": "row"}
        return growing.get(self.curve or "")

    @property
    def units(self) -> int | None:
        """How many of `per` a step has."""
        return self.lookups * len(self.shapes) if self.per == "row" else self.at


@dataclass(frozen=True)
class Workload:
    """A task that several contenders are timed on.

    Attributes:
        description: The task, in a sentence.
        contenders: By name, functions that do one step; gpuopt's is called "gpuopt".
        bytes_moved: How many bytes a step must at least read and write; None where memory is not
            the limit.
        per: What a step's time is divided by, where the cost of each one matters.
        units: How many of `per` a step has.
        left_out: Contenders that take no part, with reasons.
        settle: Called after each step and not timed: waits for background work.
        peak_extra_bytes: By contender, how much memory a step needs at its peak, where measured.
    """

    description: str
    contenders: Mapping[str, Step]
    bytes_moved: int | None = None
    per: str | None = None
    units: int | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    settle: Step = lambda: None
    peak_extra_bytes: Mapping[str, int] = field(default_factory=dict)


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
        what = f"one tensor of 2^{exponent} elements"
        yield Task(f"parameters-2^{exponent}", what, [(2**exponent,)], curve="parameters")
    for count in (1, 10, 100, 1000, 10_000):
        what = f"{count:,} tensors of 256 elements"
        yield Task(f"tensors-{count}", what, [(256,)] * count, curve="tensors")
    for exponent in range(7):
        what = f"10^{exponent} rows by Zipf's law of a table of 1,000,000 x 16"
        yield Task(f"rows-10^{exponent}", what, [(10**6, 16)], 10**exponent, "rows")
    for exponent in range(3, 8):
        what = f"8,192 rows by Zipf's law of a table of 10^{exponent} x 16"
        yield Task(f"height-10^{exponent}", what, [(10**exponent, 16)], 8192, "height")


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
    contenders = (_MOST_SPARSE if task.lookups else _MOST_DENSE) + num_users
    arrays = contenders * (1 + len(JOBS[job_name].state))
    if not task.lookups:
        arrays += task.gradient_sets + _THEIR_GRADIENTS + _TEMPORARIES
    needed = task.num_parameters * itemsize(dtype) * arrays
    if free_bytes is not None and needed > free_bytes:
        return f"it needs {needed / 1e9:.1f} GB of memory, and {free_bytes / 1e9:.1f} are free"
    return None


def make_contenders(
    task: Task,
    job_name: str,
    dtype: str,
    place: Place,
    users: Sequence[tuple[str, StepMaker]] = (),
) -> Workload:
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
    return _make(task, JOBS[job_name], dtype, place, [*PEERS, *starmap(users_peer, users)])


def make_chosen(task: Task, job: Job, place: Place, names: Collection[str]) -> Workload:
    """Makes the contenders of some names, in float32; the others are not looked for."""
    return _make(task, job, "float32", place, [peer for peer in PEERS if peer.name in names])


def _make(task: Task, job: Job, dtype: str, place: Place, peers: Sequence[Peer]) -> Workload:
    drawn = _draw_lookups(task) if task.lookups else None
    job = LAZY_ADAM if drawn and job.title == "Adam" else job
    gradients = [_make_gradients(task, drawn, dtype, place) for _ in range(task.gradient_sets)]
    setting = Setting(job, dtype, place, task.shapes, gradients)
    contenders: dict[str, Step] = {}
    left_out = {}
    for peer in peers:
        if not peer.belongs(setting):
            continue
        if (reason := peer.why_not(setting)) is None:
            contenders[peer.name] = peer.make(setting)
        else:
            left_out[peer.name] = reason
    moved = _count_bytes_moved(task, drawn, job, dtype)
    return Workload(task.description, contenders, moved, task.per, task.units, left_out)


def _make_gradients(task: Task, drawn: _Drawn | None, dtype: str, place: Place) -> list[Any]:
    xp = place.xp
    if drawn is None:
        return [_make_gradient(xp, shape, np.dtype(DTYPES[dtype])) for shape in task.shapes]
    # Arrays of their own: else a cache would have the gradients of equal tables but the first.
    return [
        gpuopt.IndexedSlices(xp.asarray(values.copy()), xp.asarray(rows.copy()))
        for rows, values in drawn
    ]


def _count_bytes_moved(task: Task, drawn: _Drawn | None, job: Job, dtype: str) -> int:
    """Counts what a step reads and writes at least.

    These are the weight and the state, which it reads and writes, and the gradient; of tables, only
    the rows that have one.
    """
    arrays = 2 * (1 + len(job.state))
    if drawn is None:
        return task.num_parameters * itemsize(dtype) * (1 + arrays)
    return sum(
        values.nbytes + rows.nbytes + arrays * np.unique(rows).size * values[0].nbytes
        for rows, values in drawn
    )


def _draw_lookups(task: Task) -> _Drawn:
    """Returns (rows, values) for each table."""
    drawn = {
        (height, width): draw_lookups((height, width), task.lookups)
        for height, width in set(task.shapes)
    }
    return [drawn[height, width] for height, width in task.shapes]


def make_run(
    workload: Workload,
    contenders: Mapping[str, Figures],
    copies: Copies | None = None,
    **others: Any,
) -> Run:
    """Returns the results of a workload.

    Args:
        workload: What was timed.
        contenders: The figures, by name.
        copies: For comparison.
        **others: Other attributes of `Run`.
    """
    return Run(
        workload.description,
        workload.bytes_moved,
        workload.per,
        workload.units,
        copy_ms=[round(ms, 6) for ms in copies.samples_ms] if copies else [],
        copy_gb_per_s=round(copies.gb_per_s, 6) if copies else None,
        contenders=dict(contenders),
        left_out=dict(workload.left_out),
        **others,
    )


def itemsize(dtype: str) -> int:
    """Returns how many bytes an element of this type has."""
    return int(np.dtype(DTYPES[dtype]).itemsize)


def _make_gradient(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    noise = np.random.default_rng(0).standard_normal(min(2**20, math.prod(shape)), np.float32)
    return xp.asarray(np.resize(noise, shape).astype(dtype))
