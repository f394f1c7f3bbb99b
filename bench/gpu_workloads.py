"""The workloads of the benchmark on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import gpuopt
from bench.harness import Workload
from gpuopt.bench.clock import Step
from gpuopt.bench.contenders import (
    make_elementwise_dense_step,
    make_naive_dense_step,
    make_naive_sparse_step,
    make_our_dense_step,
    make_our_sparse_step,
)
from gpuopt.bench.jobs import JOBS, RATE, Place
from gpuopt.bench.models import Shapes, draw_lookups, list_gpt2_shapes, list_resnet50_shapes, shrink
from gpuopt.bench.peers import (
    TORCH_FORMS,
    make_torch_dense_step,
    make_torch_sparse_step,
    why_not_torch,
)

# With "fresh" gradients, the steps use this many sets of gradient arrays in turn.
_FRESH_SETS = 3
_LARGE = ("adam", "momentum", "adagrad")
# With more tensors than this, array operations are left out.
_MOST_NAIVE = 1000


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are; tests make them small.

    Attributes:
        large: The number of elements of each of the four large tensors.
        many: For each name: (number of small tensors, number of elements of each).
        table: The embedding table's (height, width).
        lookups: The number of rows of a sparse gradient.
        tables: Of each of the ten tables that are updated in one call: (height, width).
        lookups_of_each: The number of rows of each one's gradient.
        divisor: Each side of a model's tensors is divided by this.
    """

    large: int = 40 * 2**20
    many: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"1000x1024": (1_000, 1_024), "10000x64": (10_000, 64)}
    )
    table: tuple[int, int] = (10_000_000, 128)
    lookups: int = 65_536
    tables: tuple[int, int] = (1_680_000, 128)
    lookups_of_each: int = 105_000
    divisor: int = 1


class Offer(NamedTuple):
    """A workload that has not been made yet.

    Attributes:
        name: The workload's name.
        needed_bytes: How much of the device's memory it needs.
        make: Makes the workload. Also returns the contenders that cannot run here, with reasons.
    """

    name: str
    needed_bytes: int
    make: Callable[[], tuple[Workload, dict[str, str]]]


def offer_workloads(
    place: Place, pattern: str = "*", sizes: Sizes | None = None
) -> Iterator[Offer]:
    """Yields an offer for each workload whose name matches the pattern."""
    for offer in _offer_all(place, sizes or Sizes()):
        if fnmatch(offer.name, pattern):
            yield offer


def _offer_all(place: Place, sizes: Sizes) -> Iterator[Offer]:
    large = [(sizes.large,)] * 4
    for job in _LARGE:
        yield _offer_dense(place, job, "160m", f"4 tensors of {sizes.large:,} elements each", large)
    gpt2 = shrink(list_gpt2_shapes(), sizes.divisor)
    yield _offer_dense(place, "adam", "gpt2", "the 148 tensors of GPT-2 124M", gpt2)
    resnet50 = shrink(list_resnet50_shapes(), sizes.divisor)
    for job in ("adam", "momentum"):
        yield _offer_dense(place, job, "resnet50", "the 161 tensors of a ResNet-50", resnet50)
    table, tables = (sizes.table, sizes.lookups, 1), (sizes.tables, sizes.lookups_of_each, 10)
    yield _offer_sparse(place, _ADAGRAD, *table)
    yield _offer_sparse(place, _LAZY_ADAM, *table)
    yield _offer_sparse(place, _LAZY_ADAM, *tables)
    for name, (count, size) in sizes.many.items():
        what, shapes = f"{count:,} tensors of {size:,} elements each", [(size,)] * count
        yield _offer_dense(
            place, "adam", f"{name}_same", f"{what}, gradients in the same arrays", shapes
        )
        yield _offer_dense(
            place, "adam", f"{name}_fresh", f"{what}, gradients in other arrays", shapes, True
        )


def _offer_dense(
    place: Place, job_name: str, name: str, what: str, shapes: Shapes, is_fresh: bool = False
) -> Offer:
    job = JOBS[job_name]
    num_sets = _FRESH_SETS if is_fresh else 1
    elements = sum(map(math.prod, shapes))

    def make() -> tuple[Workload, dict[str, str]]:
        xp = place.xp
        gradients = [_make_gradients(xp, shapes) for _ in range(num_sets)]

        def make_weights() -> list[Any]:
            return [xp.ones(shape, dtype=np.float32) for shape in shapes]

        contenders: dict[str, Step] = {
            "gpuopt": make_our_dense_step(job, make_weights(), gradients)
        }
        left_out = {}
        for title, form in TORCH_FORMS.items():
            reason = why_not_torch(job, place, form)
            if reason is None:
                contenders[title] = make_torch_dense_step(job, make_weights(), gradients, form)
            else:
                left_out[title] = reason
        if hasattr(xp, "ElementwiseKernel"):
            contenders["a kernel for each parameter"] = make_elementwise_dense_step(
                job, xp, make_weights(), gradients
            )
        if len(shapes) <= _MOST_NAIVE:
            contenders["array operations"] = make_naive_dense_step(
                job, xp, make_weights(), gradients
            )
        else:
            left_out["array operations"] = "it would launch a hundred thousand kernels in each step"
        workload = Workload(
            f"gpu_{job_name}_{name}",
            f"{job.title} on {what}",
            # A step reads and writes the weight and the state, and reads the gradient.
            elements * 4 * (3 + 2 * len(job.state)),
            contenders,
            operations=len(shapes),
        )
        return workload, left_out

    arrays = (
        5 * (1 + len(job.state)) + num_sets + 3
    )  # five contenders, and temporaries of the formula
    return Offer(f"gpu_{job_name}_{name}", 4 * elements * arrays, make)


def _make_gradients(xp: Any, shapes: Shapes) -> list[Any]:
    noise = np.random.default_rng(0).standard_normal(2**20, np.float32)
    return [xp.asarray(np.resize(noise[: math.prod(shape)], shape)) for shape in shapes]


def _torch_adagrad(torch: Any, parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, RATE, initial_accumulator_value=0.1)


def _torch_sparse_adam(torch: Any, parameters: Any) -> Any:
    return torch.optim.SparseAdam(parameters, RATE)


class _SparseJob(NamedTuple):
    """An optimizer of tables.

    Attributes:
        job: The name of its formula, among `JOBS`.
        title: Its name.
        ours: Makes gpuopt's, from the learning rate.
        peer: Makes torch's, from (torch, parameters).
    """

    job: str
    title: str
    ours: Callable[[float], gpuopt.Optimizer]
    peer: Callable[[Any, Any], Any]


_ADAGRAD = _SparseJob("adagrad", "Adagrad", gpuopt.AdagradOptimizer, _torch_adagrad)
_LAZY_ADAM = _SparseJob("adam", "LazyAdam", gpuopt.LazyAdamOptimizer, _torch_sparse_adam)


def _offer_sparse(
    place: Place, sparse: _SparseJob, table: tuple[int, int], lookups: int, num_tables: int
) -> Offer:
    """Offers steps of tables of one size, each of which has a gradient of `lookups` rows."""
    job = JOBS[sparse.job]
    height, width = table
    name = f"gpu_sparse_{sparse.title.lower()}"
    where = f"a table of {height:,} x {width}"
    if num_tables > 1:
        name += f"_{num_tables}_tables"
        where = f"each of {num_tables} tables of {height:,} x {width}"

    def make() -> tuple[Workload, dict[str, str]]:
        xp = place.xp
        host_rows, host_values = draw_lookups(table, lookups)
        # Arrays of their own: else a cache would have the gradients of all tables but the first.
        gradients = [(xp.asarray(host_values), xp.asarray(host_rows)) for _ in range(num_tables)]

        def make_tables() -> list[Any]:
            return [xp.ones(table, dtype=np.float32) for _ in range(num_tables)]

        ours = partial(sparse.ours, RATE)
        contenders: dict[str, Step] = {
            "gpuopt": make_our_sparse_step(ours, make_tables(), gradients)
        }
        left_out = {}
        if find_spec("torch") is None:
            left_out["torch sparse"] = "torch is not installed"
        else:
            contenders["torch sparse"] = make_torch_sparse_step(
                sparse.peer, make_tables(), gradients
            )
        contenders["array operations"] = make_naive_sparse_step(job, xp, make_tables(), gradients)
        touched = int(np.unique(host_rows).size)
        # A step reads the gradient's rows and their numbers, and of each different row reads and
        # writes the weights and the state.
        given = host_values.nbytes + 8 * lookups
        updated = 8 * (1 + len(job.state)) * touched * width
        workload = Workload(
            name,
            f"{sparse.title} on {lookups:,} rows ({touched:,} different) of {where}",
            num_tables * (given + updated),
            contenders,
        )
        return workload, left_out

    return Offer(name, 4 * height * width * num_tables * 3 * (1 + len(job.state)), make)
