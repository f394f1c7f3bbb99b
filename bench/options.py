"""Steps with options of gpuopt's optimizers, beside steps without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

import gpuopt
from bench.harness import Offer
from bench.low_precision import SEED
from bench.targets import list_targets
from gpuopt.bench.clock import Step
from gpuopt.bench.contenders import make_contender
from gpuopt.bench.jobs import JOBS, RATE, WEIGHT_DECAY, Place
from gpuopt.bench.models import Shapes
from gpuopt.bench.peers import NUMPY_ALONE
from gpuopt.bench.sampling import rest
from gpuopt.bench.workloads import Task, Workload, list_tasks, make_chosen

_HOST = Place(np, "cpu")
_MODELS = {task.name: task for task in list_tasks()}
_CLIP_NORM, _AVERAGE = 1.0, 0.999
_GROUPS = 40
_PLAIN_SLOTS = "float32 slots"
_PLAIN = "float32 variables and slots"
_BFLOAT16 = ml_dtypes.bfloat16
# Makes a contender of gradients, for variables of their shapes and types.
_Way = Callable[[Sequence[Any]], Step]


def _offer_options() -> Iterator[Offer]:
    for size, task in (("16m", _MODELS["16m"]), ("resnet50", _MODELS["resnet-50"])):
        is_one = size == "16m"
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
                "apply after it": partial(_by_hand, clips=False),
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
                "clip_by_global_norm": partial(_by_hand, clips=True),
            },
            partial(_torch_clipped, "torch clip_grad_norm_, fused", averaged=False),
        )
    large = _MODELS["16m"].shapes
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
        {"slot_dtype": "bfloat16", "stochastic_rounding": SEED},
    ),
    "stochastic": (
        *("bfloat16, rounded stochastically", _BFLOAT16, 22, 4.0),
        {"stochastic_rounding": SEED},
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
        return _make_step(make(**given), _make_pairs(gradients))

    return way


def _make_step(optimizer: gpuopt.Optimizer, pairs: Sequence[Any], compiled: bool = True) -> Step:
    return make_contender(optimizer, partial(optimizer.apply_gradients, pairs), compiled)


def _make_pairs(gradients: Sequence[Any]) -> list[tuple[Any, gpuopt.Variable]]:
    """Pairs gradients with variables that own their arrays, as master copies need."""
    return [(gradient, gpuopt.Variable(np.ones_like(gradient))) for gradient in gradients]


def _step_of_type(dtype: Any, options: dict[str, Any], gradients: Sequence[Any]) -> Step:
    return _with(_adam, **options)([gradient.astype(dtype) for gradient in gradients])


def _by_hand(gradients: Sequence[Any], clips: bool) -> Step:
    """Makes a step of AdamW that clips or averages by a call of its own."""
    pairs = _make_pairs(gradients)
    variables = [variable for _, variable in pairs]
    optimizer = _adam_w(clip_norm=None if clips else _CLIP_NORM)
    averages = _averages()

    def step_and_average() -> None:
        optimizer.apply_gradients(pairs)
        averages.apply(variables)

    def clip_and_step() -> None:
        clipped, _ = gpuopt.clip_by_global_norm(gradients, _CLIP_NORM)
        optimizer.apply_gradients(list(zip(clipped, variables, strict=True)))

    return clip_and_step if clips else step_and_average


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
    task = _MODELS["resnet-50"]
    contenders: dict[str, Step] = {}
    for title, num_groups in (("gpuopt", _GROUPS), ("one group", 1)):
        for name, compiled in ((title, True), (f"{title}, numpy alone", False)):
            contenders[name] = _make_groups_step(task.shapes, num_groups, compiled)
    what = f"AdamW with {_GROUPS} parameter groups on {task.description}"
    return Workload(what, contenders, 4 * task.num_parameters * 7, settle=rest)


def _make_groups_step(shapes: Shapes, num_groups: int, compiled: bool) -> Step:
    pairs = _make_pairs(_draw_gradients(shapes))
    variables = [variable for _, variable in pairs]
    groups = [
        gpuopt.ParameterGroup(
            variables=variables[i::num_groups], learning_rate=RATE / i, weight_decay=0.0
        )
        for i in range(1, num_groups)
    ]
    return _make_step(_adam_w(groups=groups), pairs, compiled)


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


OFFERS = (*_offer_options(),)
