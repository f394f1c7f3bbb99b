"""What torch's calls launch, move and wait for in a step with stages, as its sources say.

No torch runs here. `calls_for` lists what a user of torch calls where an option of gpuopt does the
same; `count` says what that makes. Only kernels and copies that the sources name are counted, and
of two ways to do the same the one that moves less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

VERSION = "2.13.0"
# Lists of tensors go by chunks of 65,536 elements, so many of them in a launch, of as many tensors
# as its arguments hold, by how many lists there are: depth_to_max_blocks and depth_to_max_tensors
# in ATen/native/cuda/MultiTensorApply.cuh, for CUDA 13. Before it they are 320, and a seventh.
CHUNK, BLOCKS = 65536, 2240
_TENSORS: Mapping[int, int] = {1: 770, 2: 448, 3: 336, 4: 252}
_ONE_BY_ONE = 0

# Bytes.
_FLOAT, _BFLOAT16 = 4, 2
# What gpuopt is alone with: torch has no call for it. Packages beside torch have some.
ALONE: Mapping[str, str] = {
    "cautious": "cautious rules",
    "remainders": "remainder masters",
    "rounding": "stochastic rounding",
    "8 bits": "slots in 8 bits",
}


class Pass(NamedTuple):
    """Kernels that go through all elements of some tensors.

    Attributes:
        num_bytes: What is read and written of an element.
        lists: How many lists of tensors they take; 0 for a kernel for each tensor.
        share: Of how many of the tensors, from 0 to 1.
    """

    num_bytes: int
    lists: int
    share: float = 1


class Call(NamedTuple):
    """A call of torch's.

    Attributes:
        name: What the user writes.
        source: Where torch's sources say what it does, and of what kernels on single numbers.
        passes: Over gradients, parameters and their state.
        others: Kernels on single numbers.
        copies: Of single numbers.
        waits: How often the host waits for the GPU.
    """

    name: str
    source: str
    passes: Sequence[Pass] = ()
    others: int = 0
    copies: int = 0
    waits: int = 0


class Counted(NamedTuple):
    """What calls do.

    Attributes:
        launches: Kernels.
        copies: Of single numbers.
        waits: How often the host waits.
        num_bytes: What kernels read and write of gradients, parameters and their state.
    """

    launches: int
    copies: int
    waits: int
    num_bytes: int


def clip_value(item: int) -> Call:
    source = "torch/nn/utils/clip_grad.py: `_foreach_clamp_min_`, then `_foreach_clamp_max_`"
    return Call("clip_grad_value_(foreach=True)", source, [Pass(2 * item, 1)] * 2)


def total_norm(item: int) -> Call:
    source = (
        "torch/nn/utils/clip_grad.py: `_foreach_norm` (ForeachReduceOp.cu: zeros, a sum of each "
        "tensor's chunks), stack, vector_norm"
    )
    return Call("get_total_norm(foreach=True)", source, [Pass(item, 1)], others=4)


def clip_norm(item: int) -> Call:
    norm = total_norm(item)
    source = (
        "torch/nn/utils/clip_grad.py: get_total_norm's, an addition, a reciprocal and a product "
        "(`Tensor.__rdiv__`), clamp; `_foreach_mul_`"
    )
    passes = [*norm.passes, Pass(2 * item, 1)]
    return Call("clip_grad_norm_(foreach=True)", source, passes, others=norm.others + 4)


def is_finite() -> Call:
    source = "ATen/native/TensorCompare.cpp: abs, two comparisons, a product; the host reads it"
    return Call("if isfinite(norm)", source, others=4, copies=1, waits=1)


def unscale(item: int) -> Call:
    source = (
        "torch/amp/grad_scaler.py: the scale to double, reciprocal, to float, a fill; copies of "
        "two numbers; `_amp_foreach_non_finite_check_and_unscale_`"
    )
    return Call("GradScaler.unscale_", source, [Pass(2 * item, 1)], others=4, copies=2)


def step_of_scaled(item: int) -> Call:
    source = (
        "torch/amp/grad_scaler.py: `_check_inf_per_device` (two fills, copies of two numbers, "
        "`_amp_foreach_non_finite_check_and_unscale_` by 1), a sum, a product"
    )
    return Call("GradScaler.step", source, [Pass(2 * item, 1)], others=4, copies=2)


def step_of_unscaled() -> Call:
    source = "torch/amp/grad_scaler.py: a sum"
    return Call("GradScaler.step, after unscale_", source, others=1)


def update_scale() -> Call:
    return Call("GradScaler.update", "torch/amp/grad_scaler.py: `_amp_update_scale_`", others=1)


def adam(
    item: int,
    slot: int | None = None,
    *,
    num_groups: int = 1,
    may_skip: bool = False,
    unscales: bool = False,
) -> Call:
    """AdamW(fused=True).step, which is Adam's with another decay.

    Args:
        item: Of a parameter and its gradient, in bytes.
        slot: Of the moments; None for the same.
        num_groups: Of parameters, each of as many.
        may_skip: Whether a GradScaler found whether gradients are finite.
        unscales: Whether it has not unscaled them yet: they are written, too.
    """
    name, of_count = "AdamW(fused=True).step", "the counts of steps grow by `_foreach_add_`"
    if slot is not None:
        name += ", moments made in bfloat16"
    if num_groups > 1:
        name += f", {num_groups} param_groups"
    if may_skip:
        name += ", unscaling" if unscales else ", may skip"
        of_count += ", and shrink by `_foreach_sub_`"
    moved = (3 + unscales) * item + 4 * (item if slot is None else slot)
    source = f"torch/optim/adam.py, ATen/native/cuda/fused_adam_utils.cuh: {of_count}"
    passes = [Pass(moved, 4, 1 / num_groups)] * num_groups
    return Call(name, source, passes, others=num_groups * (1 + may_skip))


def average(item: int) -> Call:
    source = "torch/optim/swa_utils.py: `_foreach_lerp_`"
    return Call("get_ema_multi_avg_fn(decay)", source, [Pass(3 * item, 2)])


def copy(source_item: int, target_item: int) -> Call:
    source = "ATen/native/cuda/ForeachBinaryOpList.cu"
    what = "to the masters' gradients" if source_item < target_item else "from the masters"
    return Call(f"_foreach_copy_, {what}", source, [Pass(source_item + target_item, 2)])


def add_gradients(item: int) -> Call:
    source = "torch/csrc/autograd/functions/accumulate_grad.h, case 2.3: `grad += new`"
    return Call("backward, with gradients there", source, [Pass(3 * item, _ONE_BY_ONE)])


def keep_gradients() -> Call:
    source = "torch/csrc/autograd/functions/accumulate_grad.h, case 1.1: they are kept as they are"
    return Call("backward, after zero_grad(set_to_none=True)", source)


def calls_for(stages: Sequence[str]) -> list[Call] | None:
    """Lists torch's calls that do what a step of Adam with stages does.

    Args:
        stages: What `bench.gpu_launches` knows.

    Returns:
        In order; None if torch has none for one of the stages: see `ALONE`.
    """
    if ALONE.keys() & set(stages):
        return None
    is_clipped, is_scaled = "clip_norm" in stages, "loss_scale" in stages
    is_unscaled_first = is_scaled and bool({"clip_norm", "clip_value"} & set(stages))
    item = _BFLOAT16 if {"masters", "bfloat16"} & set(stages) else _FLOAT
    calls: list[Call] = []
    if "first call" in stages:
        return [keep_gradients()]
    if "accumulation" in stages:
        calls.append(add_gradients(item))
    if "call between" in stages:
        return calls
    if "masters" in stages:
        if is_clipped and not is_scaled:  # here they are smaller
            calls.append(clip_norm(item))
        calls.append(copy(item, _FLOAT))
        item = _FLOAT
    if is_unscaled_first:
        calls.append(unscale(item))
    if is_clipped and (is_scaled or "masters" not in stages):
        calls.append(clip_norm(item))
    if "on_nonfinite" in stages:
        calls += [is_finite()] if is_clipped else [total_norm(item), is_finite()]
    if "clip_value" in stages:
        calls.append(clip_value(item))
    if is_scaled:
        calls.append(step_of_unscaled() if is_unscaled_first else step_of_scaled(item))
    calls.append(
        adam(
            item,
            _BFLOAT16 if "slot_dtype" in stages else None,
            num_groups=2 if "groups" in stages else 1,
            may_skip=is_scaled,
            unscales=is_scaled and not is_unscaled_first,
        )
    )
    if is_scaled:
        calls.append(update_scale())
    if "masters" in stages:
        calls.append(copy(_FLOAT, _BFLOAT16))
    if "averages" in stages:
        calls.append(average(item))
    return calls


def count(calls: Sequence[Call], shapes: Sequence[Sequence[int]]) -> Counted:
    """Counts what calls do.

    Args:
        calls: In any order.
        shapes: Of the parameters, all of one size.
    """
    size = math.prod(shapes[0])
    passes = [each for call in calls for each in call.passes]
    launches = sum(_launches(each, len(shapes), size) for each in passes)
    return Counted(
        launches + sum(call.others for call in calls),
        sum(call.copies for call in calls),
        sum(call.waits for call in calls),
        round(sum(each.num_bytes * each.share for each in passes) * len(shapes) * size),
    )


def _launches(one: Pass, num_tensors: int, size: int) -> int:
    tensors = round(num_tensors * one.share)
    if one.lists == _ONE_BY_ONE:
        return tensors
    chunks = tensors * math.ceil(size / CHUNK)
    return max(math.ceil(chunks / BLOCKS), math.ceil(tensors / _TENSORS[one.lists]))
