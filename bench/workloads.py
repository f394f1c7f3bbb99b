"""All workloads: of `python -m bench` in host memory, and of `python -m bench.gpu`.

Models, optimizers and most contenders are those of `gpuopt bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

import gpuopt
from bench import autodiff, catch_up, checkpoints, first_step, low_precision, step_path
from bench.harness import Offer, Step, Workload
from bench.targets import Target, list_targets
from gpuopt.backends import backend_for
from gpuopt.bench.contenders import make_contender, make_our_step
from gpuopt.bench.jobs import JOBS, RATE, WEIGHT_DECAY, Place
from gpuopt.bench.models import LOOKUPS, TABLE, Shapes, draw_lookups, shrink
from gpuopt.bench.peers import TORCH_FORMS
from gpuopt.bench.sampling import rest
from gpuopt.bench.workloads import ARRAYS, NUMPY_ALONE, Task, list_tasks, make_chosen
from gpuopt.device import Device

_HOST = Place(np, "cpu")
_MODELS = {task.name: task for task in list_tasks()}


def offer_host_workloads(pattern: str = "*") -> Iterator[Offer]:
    """Yields the workloads in host memory whose names match the pattern."""
    for offer in _HOST_OFFERS:
        if fnmatch(offer.name, pattern):
            yield offer


def _make(job_name: str, task: Task, place: Place, names: Collection[str]) -> Workload:
    """Makes a task's contenders of some names."""
    job = JOBS[job_name]
    made = make_chosen(task, job, place, names)
    title = "LazyAdam" if task.lookups and job_name == "adam" else job.title
    return Workload(
        f"{title} on {task.description}",
        made.contenders,
        made.bytes_moved,
        # On a GPU, each kernel that is launched costs.
        None if place.on_host or task.lookups else len(task.shapes),
        settle=rest if place.on_host else lambda: None,
        left_out=made.left_out,
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


# Options of gpuopt's optimizers, beside steps without them

_CLIP_NORM, _AVERAGE = 1.0, 0.999
_GROUPS = 40
_PLAIN_SLOTS = "float32 slots"
_PLAIN = "float32 variables and slots"
_BFLOAT16 = ml_dtypes.bfloat16
# Makes a contender of gradients, for variables of their shapes and types.
_Way = Callable[[Sequence[Any]], Step]


def _offer_options() -> Iterator[Offer]:
    for size in _LARGE:
        task, is_one = _SIZES[size], size == "16m"
        yield _offer(
            f"average_adam_w_{size}",
            f"AdamW with clip_norm and averages on {task.description}",
            task.shapes,
            # Gradients are read twice, the variable, its slots and its average read and written.
            40,
            {"torch clip, AdamW fused, lerp": 0.8} | ({"plain Adam": 1.75} if is_one else {}),
            {
                "gpuopt": _with(_adam_w, clip_norm=_CLIP_NORM, averages=_averages),
                "plain Adam": _with(_adam),
                "apply after it": partial(_step_and_average, clip_norm=_CLIP_NORM),
            },
            partial(_torch_clipped, "torch clip, AdamW fused, lerp", averaged=True),
        )
        yield _offer(
            f"clip_adam_w_{size}",
            f"AdamW with clip_norm on {task.description}",
            task.shapes,
            # Gradients are read twice.
            32,
            {"torch clip_grad_norm_, fused": 0.9} | ({"without clipping": 1.5} if is_one else {}),
            {
                "gpuopt": _with(_adam_w, clip_norm=_CLIP_NORM),
                "without clipping": _with(_adam_w),
                "clip_by_global_norm": _clip_and_step,
            },
            partial(_torch_clipped, "torch clip_grad_norm_, fused", averaged=False),
        )
    large = _SIZES["16m"].shapes
    yield _offer(
        "slot_bits_adam_16m",
        f"Adam with slots in 8 bits on {2**24:,} elements",
        large,
        # Of each slot, a byte is read and written, and the scale of a block of 256.
        4 + 2 * (4 + 1 + 1) + 4 * 4 / 256,
        {"bitsandbytes AdamW8bit": 0.5, _PLAIN_SLOTS: 2.5},
        {"gpuopt": _with(_adam, slot_bits=8), _PLAIN_SLOTS: _with(_adam)},
        _bitsandbytes,
    )
    for kind, (what, dtype, moved, limit, options) in _STORED.items():
        yield _offer(
            f"{kind}_adam_16m",
            f"Adam on {2**24:,} elements, {what}",
            large,
            moved,
            {_PLAIN: limit},
            {"gpuopt": partial(_step_of_type, dtype, options), _PLAIN: _with(_adam)},
        )
    for which, (what, limit, shapes) in _ROW_WISE.items():
        name = f"host_row_wise_{which}"
        limits = {"Adagrad": limit}, {"Adagrad, numpy alone": limit}
        yield Offer(name, partial(_make_row_wise, what, shapes), list_targets(name, *limits))
    limits = {"one group": 1.05}, {"one group, numpy alone": 1.05}
    yield Offer("host_groups", _make_groups, list_targets("host_groups", *limits))
    append = list_targets("append_rows", {"copies of the arrays": 1.3})
    yield Offer("append_rows", _make_append_rows, append)


def _offer(
    name: str,
    what: str,
    shapes: Shapes,
    bytes_moved: float,
    ratios: Mapping[str, float],
    ways: Mapping[str, _Way],
    of_others: Callable[[Sequence[Any]], Mapping[str, Step]] = lambda _: {},
) -> Offer:
    """Offers steps with options beside steps without them.

    Args:
        name: The workload's name.
        what: Its description.
        shapes: The variables'.
        bytes_moved: For each element.
        ratios: The largest ratios to other contenders.
        ways: gpuopt's steps.
        of_others: Makes the steps of other libraries that are installed.
    """

    def make() -> Workload:
        gradients = _draw_gradients(shapes)
        contenders = {title: way(gradients) for title, way in ways.items()}
        moved = round(bytes_moved * sum(gradient.size for gradient in gradients))
        return Workload(what, {**contenders, **of_others(gradients)}, moved, settle=rest)

    return Offer(name, make, list_targets(name, ratios))


# What is stored: in words, the variables' type, the bytes moved for each parameter, the largest
# ratio to `_PLAIN`, and the options.
_STORED: Mapping[str, tuple[str, Any, int, float, dict[str, Any]]] = {
    "masters": ("bfloat16 with float32 masters", _BFLOAT16, 28, 2.0, {"masters": "float32"}),
    "remainder": ("bfloat16 with remainders", _BFLOAT16, 26, 2.0, {"masters": "remainder"}),
    "slot_dtype": (
        *("float32 with bfloat16 slots", np.float32, 20, 2.0),
        {"slot_dtype": "bfloat16"},
    ),
    "remainder_slot_dtype": (
        *("bfloat16 with remainders and bfloat16 slots", _BFLOAT16, 18, 2.0),
        {"masters": "remainder", "slot_dtype": "bfloat16"},
    ),
    "stochastic_slot_dtype": (
        *("float32 with bfloat16 slots that are rounded stochastically", np.float32, 20, 4.0),
        {"slot_dtype": "bfloat16", "stochastic_rounding": low_precision.SEED},
    ),
    "stochastic": (
        *("bfloat16, rounded stochastically", _BFLOAT16, 22, 4.0),
        {"stochastic_rounding": low_precision.SEED},
    ),
}


# The largest ratio of row-wise Adagrad's time to Adagrad's: a vector's rows are its elements, and a
# narrow table's are summed one by one.
_ROW_WISE: Mapping[str, tuple[str, float, Shapes]] = {
    "vector": ("one vector of 4,194,304 elements", 1.3, [(2**22,)]),
    "5_columns": ("one table of 800,000 x 5", 2.0, [(800_000, 5)]),
    "64_columns": ("one table of 65,536 x 64", 1.3, [(2**16, 64)]),
    "400x40x5": ("400 tables of 40 x 5", 2.0, [(40, 5)] * 400),
}


def _draw_gradients(shapes: Shapes) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


_adam = partial(gpuopt.AdamOptimizer, RATE)
_adam_w = partial(gpuopt.AdamWOptimizer, WEIGHT_DECAY * RATE, RATE)
_averages = partial(gpuopt.ExponentialMovingAverage, _AVERAGE)


def _with(make: Callable[..., gpuopt.Optimizer], **options: Any) -> _Way:
    """Returns a way to make steps with options; what a callable makes is an optimizer's own."""

    def way(gradients: Sequence[Any]) -> Step:
        given = {key: value() if callable(value) else value for key, value in options.items()}
        variables = [np.ones_like(gradient) for gradient in gradients]
        return make_our_step(partial(make, **given), variables, [gradients])

    return way


def _step_of_type(dtype: Any, options: dict[str, Any], gradients: Sequence[Any]) -> Step:
    return _with(_adam, **options)([gradient.astype(dtype) for gradient in gradients])


def _step_and_average(gradients: Sequence[Any], **options: Any) -> Step:
    variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
    optimizer, averages = _adam_w(**options), _averages()
    pairs = list(zip(gradients, variables, strict=True))

    def step() -> None:
        optimizer.apply_gradients(pairs)
        averages.apply(variables)

    return step


def _clip_and_step(gradients: Sequence[Any]) -> Step:
    variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
    optimizer = _adam_w()

    def step() -> None:
        clipped, _ = gpuopt.clip_by_global_norm(gradients, _CLIP_NORM)
        optimizer.apply_gradients(list(zip(clipped, variables, strict=True)))

    return step


def _torch_clipped(title: str, gradients: Sequence[np.ndarray], averaged: bool) -> dict[str, Step]:
    """Makes torch's clipping and AdamW, and averages; nothing without torch."""
    if find_spec("torch") is None:
        return {}
    import torch

    parameters = [torch.nn.Parameter(torch.ones(gradient.shape)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=WEIGHT_DECAY, fused=True)
    values = [parameter.detach() for parameter in parameters]
    averages = [value.clone() for value in values]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP_NORM, foreach=True)
        optimizer.step()
        if averaged:
            torch._foreach_lerp_(averages, values, 1 - _AVERAGE)

    return {title: step}


def _bitsandbytes(gradients: Sequence[np.ndarray]) -> dict[str, Step]:
    if find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes
    import torch

    [gradient] = gradients
    parameter = torch.nn.Parameter(torch.ones(gradient.size))
    parameter.grad = torch.from_numpy(gradient)
    theirs = bitsandbytes.optim.AdamW8bit([parameter], lr=RATE, weight_decay=0.0)
    return {"bitsandbytes AdamW8bit": theirs.step}


def _make_row_wise(what: str, shapes: Shapes) -> Workload:
    task = Task("row_wise", what, shapes)
    contenders: dict[str, Step] = {}
    for title, ours in (
        ("gpuopt", lambda: gpuopt.RowWiseAdagradOptimizer(RATE)),
        ("Adagrad", lambda: gpuopt.AdagradOptimizer(RATE)),
    ):
        job = JOBS["adagrad"]._replace(ours=ours)
        made = make_chosen(task, job, _HOST, ("gpuopt", NUMPY_ALONE))
        contenders |= {
            name.replace("gpuopt", title): each for name, each in made.contenders.items()
        }
    # A step reads and writes the weights, and reads the gradient.
    moved = 3 * 4 * task.num_parameters
    return Workload(f"Row-wise Adagrad on {what}", contenders, moved, settle=rest)


def _make_groups() -> Workload:
    task = _SIZES["resnet50"]
    contenders: dict[str, Step] = {}
    for title, num_groups in (("gpuopt", _GROUPS), ("one group", 1)):
        for name, compiled in ((title, True), (f"{title}, numpy alone", False)):
            contenders[name] = _make_groups_step(task.shapes, num_groups, compiled)
    what = f"AdamW with {_GROUPS} parameter groups on {task.description}"
    return Workload(what, contenders, 4 * task.num_parameters * 7, settle=rest)


def _make_groups_step(shapes: Shapes, num_groups: int, compiled: bool) -> Step:
    gradients = _draw_gradients(shapes)
    variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
    groups = [
        gpuopt.ParameterGroup(
            variables=variables[i::num_groups], learning_rate=RATE / i, weight_decay=0.0
        )
        for i in range(1, num_groups)
    ]
    optimizer = _adam_w(groups=groups)
    pairs = list(zip(gradients, variables, strict=True))
    return make_contender(optimizer, partial(optimizer.apply_gradients, pairs), compiled)


def _make_append_rows() -> Workload:
    height, width, more = 1_000_000, 64, 1_000
    optimizer = gpuopt.AdamOptimizer(RATE)
    table = gpuopt.Variable(np.zeros((height, width), np.float32), name="table")
    optimizer.apply_gradients([(np.ones((height, width), np.float32), table)])
    rows = gpuopt.rows(table)
    values = np.ones((more, width), np.float32)
    copies = [variable.numpy() for variable in (table, *optimizer.state.slots_of(table))]

    def copy_arrays() -> None:
        # As rows do: the old arrays go when all new ones are there.
        copies[:] = [array.copy() for array in copies]

    def remove_again() -> None:
        # After each step all the same, so that both find memory that was freed in the same way.
        rows.keep(np.arange(height))
        copy_arrays()

    return Workload(
        f"{more:,} rows appended to {height:,} x {width} with Adam's slots",
        {"gpuopt": lambda: rows.append(values), "copies of the arrays": copy_arrays},
        2 * 3 * 4 * height * width,
        settle=remove_again,
    )


_HOST_OFFERS = (
    *checkpoints.OFFERS,
    *low_precision.OFFERS,
    *autodiff.OFFERS,
    *step_path.OFFERS,
    *catch_up.OFFERS,
    *first_step.OFFERS,
    *_offer_options(),
    *_offer_models(),
    *_offer_tables(),
)
# Those of a CPU.
TARGETS = tuple(target for offer in _HOST_OFFERS for target in offer.targets)


# On a GPU

# Times alone are for this one.
GPU = "NVIDIA H200"
_FEW_LARGE = [f"gpu_{job}_160m" for job in ("adam", "momentum", "adagrad")]
_SPARSE = ["gpu_sparse_adagrad", "gpu_sparse_lazyadam"]
_TEN_TABLES = "gpu_sparse_lazyadam_10_tables"
GPU_TARGETS = (
    *(Target(name, "device.ratio", "torch fused", at_most=1.0) for name in _FEW_LARGE),
    *(Target(name, "device.share_of_copy", at_least=0.9) for name in _FEW_LARGE),
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
# With "fresh" gradients, the steps use this many sets of gradient arrays in turn.
_FRESH_SETS = 3
# Of contenders with arrays of their own, how many there are at most; and temporary arrays.
_MOST_DENSE, _MOST_SPARSE, _TEMPORARIES = 5, 3, 3


@dataclass(frozen=True)
class Sizes:
    """How large the workloads on a GPU are; tests make them small.

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


def offer_gpu_workloads(
    place: Place, pattern: str = "*", sizes: Sizes | None = None
) -> Iterator[Offer]:
    """Yields the workloads on a GPU whose names match the pattern."""
    for job_name, task in _list_gpu_tasks(sizes or Sizes()):
        title = f"sparse_{job_name.replace('adam', 'lazyadam')}" if task.lookups else job_name
        name = f"gpu_{title}{task.name}"
        if fnmatch(name, pattern):
            make = partial(_make, job_name, task, place, _GPU_CONTENDERS)
            targets = [each for each in GPU_TARGETS if each.workload == name]
            yield Offer(name, make, targets, _count_needed_bytes(job_name, task))


def _list_gpu_tasks(sizes: Sizes) -> Iterator[tuple[str, Task]]:
    """Yields optimizers and what they update; a task's name is the end of its workload's."""
    what = f"4 tensors of {sizes.large:,} elements each"
    for job_name in ("adam", "momentum", "adagrad"):
        yield job_name, Task("_160m", what, [(sizes.large,)] * 4)
    for model, short, job_names in (
        ("gpt2-124m", "_gpt2", ("adam",)),
        ("resnet-50", "_resnet50", ("adam", "momentum")),
    ):
        task = _MODELS[model]
        shapes = shrink(task.shapes, sizes.divisor)
        for job_name in job_names:
            yield job_name, Task(short, task.description, shapes)
    height, width = sizes.table
    what = f"{sizes.lookups:,} rows of a table of {height:,} x {width}"
    for job_name in ("adagrad", "adam"):
        yield job_name, Task("", what, [sizes.table], sizes.lookups)
    height, width = sizes.tables
    what = (
        f"{sizes.lookups_of_each:,} rows by Zipf's law of each of 10 tables of {height:,} x {width}"
    )
    yield "adam", Task("_10_tables", what, [sizes.tables] * 10, sizes.lookups_of_each)
    for name, (count, size) in sizes.many.items():
        what, shapes = (
            f"{count:,} tensors of {size:,} elements each, gradients in",
            [(size,)] * count,
        )
        yield "adam", Task(f"_{name}_same", f"{what} the same arrays", shapes)
        yield (
            "adam",
            Task(f"_{name}_fresh", f"{what} other arrays", shapes, gradient_sets=_FRESH_SETS),
        )


def _count_needed_bytes(job_name: str, task: Task) -> int:
    of_each = 1 + len(JOBS[job_name].state)
    if task.lookups:
        return 4 * task.num_parameters * _MOST_SPARSE * of_each
    arrays = _MOST_DENSE * of_each + task.gradient_sets + _TEMPORARIES
    return 4 * task.num_parameters * arrays
